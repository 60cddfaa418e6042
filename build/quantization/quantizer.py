"""Quantises a recorded decoder in place, layer by layer, and hands out each part's tensors as they will be stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from slipstream.nn.attention import LayerCache
from slipstream.nn.decoder import Decoder, DecoderLayer
from slipstream.nn.linear import Linear
from torch import Tensor
from tqdm import tqdm

from quantization.calibration import InputStatistics, LayerWalk
from quantization.folding import fold, rows_of, shared
from quantization.gptq import round_by_feedback
from quantization.grids import Grid
from quantization.plan import Plan
from quantization.scaling import awq_factors, smoothing_factors
from quantization.storing import stored_tensors

E4M3_MAX = 448.0
Stored = Iterator[tuple[str, int, dict[str, Tensor]]]  # (module of the decoder, layer, suffix -> tensor)


@dataclass
class Quantizer:
    """walk: None if the plan needs no text."""

    decoder: Decoder
    plan: Plan
    walk: LayerWalk | None

    def run(self) -> Stored:
        """Quantise layer after layer; its tensors are on the decoder's device."""
        for index, layer in enumerate(tqdm(self.decoder.layers, "quantise", unit="layer")):
            yield from self._layer(index, layer)
        if self.plan.with_head and isinstance(self.decoder.lm_head, Linear):
            yield "lm_head", 0, self._head(self.decoder.lm_head)

    def _layer(self, index: int, layer: DecoderLayer) -> Stored:
        """A layer's linears are all fitted to what the full layer gives them, after the quantised layers before it."""
        inputs: dict[Linear, InputStatistics] = {}
        if self.walk is not None and self.plan.algorithms:
            inputs = self.walk.record(layer)
        if {"awq", "smoothquant"} & set(self.plan.algorithms):
            for linear in reversed(layer.linears()):  # each changes rows of one before it
                inputs[linear] = self._scale(layer, linear, inputs[linear])
        grids = {linear: self._round(linear, inputs.get(linear)) for linear in layer.linears()}
        ranges = _KvRanges()
        if self.walk is not None:
            self.walk.pass_on(layer, ranges.look)
        for linear, grid_of_part in grids.items():
            for part, grid in grid_of_part.items():
                yield part, index, self._stored(linear, part, grid)
        if self.plan.with_kv_scales:
            yield "attention", index, ranges.scales()

    def _scale(self, layer: DecoderLayer, linear: Linear, inputs: InputStatistics) -> InputStatistics:
        """Fold AWQ's or SmoothQuant's factors into the linear and its source. Returns what the linear sees then."""
        weight, spec = linear.weights["weight"].float(), self.decoder.spec
        every = torch.arange(weight.shape[1], device=weight.device)

        def common(factors: Tensor) -> Tensor:
            return shared(spec, layer, linear, factors)

        def quantised(scaled: Tensor, seen: InputStatistics) -> Tensor:
            return self._grid(scaled, seen).nearest(every, scaled)

        if "smoothquant" in self.plan.algorithms:
            factors = common(smoothing_factors(weight, inputs, self.plan.smoothing))
        else:
            factors = awq_factors(weight, inputs, quantised, common)
        fold(spec, layer, linear, factors.to(linear.weights["weight"].dtype))
        return inputs.rescaled(factors)

    def _round(self, linear: Linear, inputs: InputStatistics | None) -> dict[str, Grid]:
        """Put the linear's weights onto grids, one per part."""
        grids = {}
        for part, _ in linear.spec.parts:
            rows = linear.weights["weight"][rows_of(linear, part)]
            weight = rows.float()
            grids[part] = self._grid(weight, inputs)
            if inputs is not None and "gptq" in self.plan.algorithms:
                held = round_by_feedback(weight, inputs.gram, grids[part])
            else:
                held = grids[part].nearest(torch.arange(weight.shape[1], device=weight.device), weight)
            rows.copy_(held)
        return grids

    def _grid(self, weight: Tensor, inputs: InputStatistics | None) -> Grid:
        importance = None if inputs is None else inputs.gram.diagonal() / inputs.num_tokens
        return self.plan.grid(weight, importance, self.decoder.spec.dtype)

    def _stored(self, linear: Linear, part: str, grid: Grid) -> dict[str, Tensor]:
        weight = linear.weights["weight"][rows_of(linear, part)].float()
        layout = self.plan.format if self.plan.format != "compressed-tensors" else str(self.plan.config()["format"])
        return stored_tensors(weight, grid, layout, self.plan.scale_dtype(self.decoder.spec.dtype))

    def _head(self, head: Linear) -> dict[str, Tensor]:
        weight = head.weights["weight"].float()
        grid = self._grid(weight, None)
        weight = grid.nearest(torch.arange(weight.shape[1], device=weight.device), weight)
        head.weights["weight"].copy_(weight)
        return self._stored(head, "lm_head", grid)


class _KvRanges:
    """Largest key and value of a layer, over the calibration text."""

    def __init__(self) -> None:
        self.largest = [0.0, 0.0]

    def look(self, cache: LayerCache) -> None:
        for place, tensor in enumerate((cache.key, cache.value)):
            self.largest[place] = max(self.largest[place], float(tensor.abs().amax()))

    def scales(self) -> dict[str, Tensor]:
        """For e4m3 caches."""
        return {name: torch.tensor([largest / E4M3_MAX]) for name, largest in zip(("k_scale", "v_scale"), self.largest)}
