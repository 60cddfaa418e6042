"""Quantises a recorded decoder in place, layer by layer, and yields the stored tensors of each part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from slipstream.nn.decoder import Decoder, DecoderLayer
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.linear import Linear
from torch import Tensor
from tqdm import tqdm

from quantization.calibration import InputStatistics, LayerWalk, Seen, quantised_linears
from quantization.folding import expert_of, fold, shared, weight_of
from quantization.gptq import round_by_feedback
from quantization.grids import Grid
from quantization.plan import Plan
from quantization.scaling import awq_factors, smoothing_factors
from quantization.storing import stored_tensors

E4M3_MAX = 448.0
Stored = Iterator[tuple[str, int, dict[str, Tensor]]]  # (module of the decoder, layer, suffix -> tensor)


@dataclass
class Quantizer:
    """walk: None if the plan needs no text. unseen: per layer, the experts that no token of the text chose."""

    decoder: Decoder
    plan: Plan
    walk: LayerWalk | None
    unseen: list[str] = field(default_factory=list)

    def run(self) -> Stored:
        """Quantise layer after layer; its tensors are on the decoder's device."""
        for index, layer in enumerate(tqdm(self.decoder.layers, "quantise", unit="layer")):
            yield from self._layer(index, layer)
        if self.plan.with_head and isinstance(self.decoder.lm_head, Linear):
            yield "lm_head", 0, self._head(self.decoder.lm_head)

    def _layer(self, index: int, layer: DecoderLayer) -> Stored:
        """Calibrate a layer's linears on the full layer's activations, computed after the quantised previous layers."""
        linears = quantised_linears(layer)
        inputs: dict[Linear, Seen] = {}
        if self.walk is not None and self.plan.algorithms:
            inputs = self.walk.record(layer)
            self._look_for_unseen(index, inputs)
        for linear in reversed(linears):  # each changes rows of one before it
            if {"awq", "smoothquant"} & set(self._plan_of(linear).algorithms):
                inputs[linear] = self._scale(layer, linear, inputs[linear])
        grids = {linear: self._round(linear, inputs.get(linear)) for linear in linears}
        ranges = _KvRanges()
        if self.walk is not None:
            self.walk.pass_on(layer, ranges.look)
        for linear, grid_of_part in grids.items():
            for part, grid in grid_of_part.items():
                yield part, index, self._stored(linear, part, grid)
        if self.plan.with_kv_scales:
            yield "attention", index, ranges.scales()

    def _plan_of(self, linear: Linear) -> Plan:
        return self.plan.of_experts if linear.spec.num_experts else self.plan.of_linears

    def _look_for_unseen(self, index: int, inputs: dict[Linear, Seen]) -> None:
        """Record experts that no token chose, which are rounded without calibration."""
        last = list(inputs.values())[-1]
        unseen = [str(expert) for expert, statistics in enumerate(last) if not statistics.num_tokens]
        if unseen:
            self.unseen.append(f"layer {index}: {', '.join(unseen)}")

    def _scale(self, layer: DecoderLayer, linear: Linear, inputs: Seen) -> Seen:
        """Fold AWQ's or SmoothQuant's factors into the linear and its source. Returns the new input statistics.

        All experts share the factors of inputs from a norm; down has factors per expert.
        """
        weight, dtype = linear.weights["weight"], linear.weights["weight"].dtype
        if linear is layer.mlp.down and linear.spec.num_experts:
            own = [self._factors(layer, linear, *pair) for pair in zip(weight, inputs)]
            fold(self.decoder.spec, layer, linear, torch.stack(own).to(dtype))
            return [seen.rescaled(factors) for seen, factors in zip(inputs, own)]
        factors = self._factors(layer, linear, weight.flatten(0, -2), InputStatistics.together(inputs))
        fold(self.decoder.spec, layer, linear, factors.to(dtype))
        return [seen.rescaled(factors) for seen in inputs]

    def _factors(self, layer: DecoderLayer, linear: Linear, rows: Tensor, inputs: InputStatistics) -> Tensor:
        """rows: [out, in], the rows of the weight with these inputs."""
        weight, plan, spec = rows.float(), self._plan_of(linear), self.decoder.spec
        if not inputs.num_tokens:
            return torch.ones(weight.shape[1], device=weight.device)
        every = torch.arange(weight.shape[1], device=weight.device)

        def common(factors: Tensor) -> Tensor:
            return shared(spec, layer, linear, factors)

        def quantised(scaled: Tensor, seen: InputStatistics) -> Tensor:
            return self._grid(plan, scaled, seen).nearest(every, scaled)

        if "smoothquant" in plan.algorithms:
            return common(smoothing_factors(weight, inputs, plan.smoothing))
        return awq_factors(weight, inputs, quantised, common)

    def _round(self, linear: Linear, inputs: Seen | None) -> dict[str, Grid]:
        """Round the linear's weights to grids, one per part."""
        grids, plan = {}, self._plan_of(linear)
        for part, _ in linear.spec.parts:
            rows = weight_of(linear, part)
            weight, seen = rows.float(), None if inputs is None else inputs[expert_of(part)]
            grids[part] = self._grid(plan, weight, seen)
            if seen is not None and seen.num_tokens and "gptq" in plan.algorithms:
                held = round_by_feedback(weight, seen.gram, seen.num_tokens, grids[part])
            else:
                held = grids[part].nearest(torch.arange(weight.shape[1], device=weight.device), weight)
            rows.copy_(held)
        return grids

    def _grid(self, plan: Plan, weight: Tensor, inputs: InputStatistics | None) -> Grid:
        importance = None
        if inputs is not None and inputs.num_tokens:
            importance = inputs.gram.diagonal() / inputs.num_tokens
        return plan.grid(weight, importance, self.decoder.spec.dtype)

    def _stored(self, linear: Linear, part: str, grid: Grid) -> dict[str, Tensor]:
        plan, weight = self._plan_of(linear), weight_of(linear, part).float()
        return stored_tensors(weight, grid, plan.layout, plan.scale_dtype(self.decoder.spec.dtype))

    def _head(self, head: Linear) -> dict[str, Tensor]:
        weight = head.weights["weight"].float()
        grid = self._grid(self.plan.of_linears, weight, None)
        weight = grid.nearest(torch.arange(weight.shape[1], device=weight.device), weight)
        head.weights["weight"].copy_(weight)
        return self._stored(head, "lm_head", grid)


class _KvRanges:
    """Largest magnitudes of a layer's keys and values over the calibration text."""

    def __init__(self) -> None:
        self.largest = [0.0, 0.0]

    def look(self, cache: LayerCache) -> None:
        for place, tensor in enumerate((cache.key, cache.value)):
            self.largest[place] = max(self.largest[place], float(tensor.abs().amax()))

    def scales(self) -> dict[str, Tensor]:
        """For e4m3 caches."""
        return {name: torch.tensor([largest / E4M3_MAX]) for name, largest in zip(("k_scale", "v_scale"), self.largest)}
