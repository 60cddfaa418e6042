"""Quantises a recorded decoder in place, layer by layer, and yields the stored tensors of each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from slipstream.nn.decoder import Decoder, DecoderLayer
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.linear import Linear
from torch import Tensor
from tqdm import tqdm

from quantization.calibration import InputStatistics, LayerWalk, Seen, quantised_linears
from quantization.folding import InputGroup, expert_of, fold, input_groups, weight_of
from quantization.gptq import Feedback, round_by_feedback
from quantization.grids import Grid, stacked
from quantization.plan import Plan
from quantization.scaling import awq_factors, smoothing_factors
from quantization.storing import stored_tensors

E4M3_MAX = 448.0
MOST_GRAM_BYTES = 1 << 30  # of the statistics of experts that are rounded at once, in fp64; four such are held
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
            self._look_for_unseen(index, layer, inputs)
        for group in reversed(input_groups(layer)):
            self._scale(group, inputs)
        grids = {linear: self._round(linear, inputs.get(linear)) for linear in linears}
        ranges = _KvRanges()
        if self.walk is not None:
            self.walk.pass_on(layer, ranges.look if self.plan.with_kv_scales else None)
        for linear, grid_of_part in grids.items():
            for part, grid in grid_of_part.items():
                yield part, index, self._stored(linear, part, grid)
        if self.plan.with_kv_scales:
            yield "attention", index, ranges.scales()

    def _plan_of(self, linear: Linear) -> Plan:
        return self.plan.of_experts if linear.spec.num_experts else self.plan.of_linears

    def _look_for_unseen(self, index: int, layer: DecoderLayer, inputs: dict[Linear, Seen]) -> None:
        """Record experts that no token chose, which are rounded without calibration."""
        last = inputs[layer.mlp.down]
        unseen = [str(expert) for expert, statistics in enumerate(last) if not statistics.num_tokens]
        if unseen:
            self.unseen.append(f"layer {index}: {', '.join(unseen)}")

    def _scale(self, group: InputGroup, inputs: dict[Linear, Seen]) -> None:
        """Fold AWQ's or SmoothQuant's factors into a group and its source, where the plan has some for its linears.

        Updates the statistics of the group's inputs. All experts share the factors of inputs from a norm; down has
        factors per expert.
        """
        scaled = [linear for linear in group.linears if self._plan_of(linear).folds_factors]
        if not scaled:
            return
        plan, weights = self._plan_of(scaled[0]), [linear.weights["weight"] for linear in scaled]
        if group.per_expert:
            (linear,), (weight,) = scaled, weights
            own = [self._factors(plan, group, *pair) for pair in zip(weight, inputs[linear])]
            fold(group, torch.stack(own).to(weight.dtype))
            inputs[linear] = [seen.rescaled(factors) for seen, factors in zip(inputs[linear], own)]
            return
        rows = torch.cat([weight.flatten(0, -2) for weight in weights])
        seen = InputStatistics.together([part for linear in scaled for part in inputs[linear]])
        factors = self._factors(plan, group, rows, seen)
        fold(group, factors.to(rows.dtype))
        for linear in group.linears:
            inputs[linear] = [part.rescaled(factors) for part in inputs[linear]]

    def _factors(self, plan: Plan, group: InputGroup, rows: Tensor, inputs: InputStatistics) -> Tensor:
        """rows: [out, in], the rows of the weights with these inputs."""
        weight = rows.float()
        if not inputs.num_tokens:
            return torch.ones(weight.shape[1], device=weight.device)
        every = torch.arange(weight.shape[1], device=weight.device)

        def quantised(scaled: Tensor, seen: InputStatistics) -> Tensor:
            return self._grid(plan, scaled, seen).nearest(every, scaled)

        if "smoothquant" in plan.algorithms:
            return group.shared(smoothing_factors(weight, inputs, plan.smoothing))
        return awq_factors(weight, inputs, quantised, group.shared)

    def _round(self, linear: Linear, inputs: Seen | None) -> dict[str, Grid]:
        """Round the linear's weights to grids, one per part. Parts of one input share what GPTQ needs of it."""
        plan = self._plan_of(linear)
        grids: dict[str, Grid] = {}
        fed: list[_Fed] = []
        for expert, parts in groupby((part for part, _ in linear.spec.parts), expert_of):
            seen, names = None if inputs is None else inputs[expert], list(parts)
            weights = {part: weight_of(linear, part).float() for part in names}
            grids |= {part: self._grid(plan, weight, seen) for part, weight in weights.items()}
            if seen is not None and seen.num_tokens and "gptq" in plan.algorithms:
                fed.append(_Fed(seen, names))
                continue
            for part, weight in weights.items():
                every = torch.arange(weight.shape[1], device=weight.device)
                weight_of(linear, part).copy_(grids[part].nearest(every, weight))
        at_once = max(1, MOST_GRAM_BYTES // (8 * linear.spec.in_features**2))
        for first in range(0, len(fed), at_once):
            _feed_back(linear, fed[first : first + at_once], grids)
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


@dataclass(frozen=True)
class _Fed:
    """The parts of a linear that have one input, of experts those of one expert, and what was seen of it."""

    seen: InputStatistics
    parts: list[str]


def _feed_back(linear: Linear, fed: Sequence[_Fed], grids: Mapping[str, Grid]) -> None:
    """Round by GPTQ, all experts at once: their weights have the same shapes, and steps of many are few launches."""
    num_rows = torch.tensor([one.seen.num_tokens for one in fed], device=fed[0].seen.gram.device)
    feedback = Feedback.of(torch.stack([one.seen.gram for one in fed]), num_rows)
    for parts in zip(*(one.parts for one in fed), strict=True):
        rows = [weight_of(linear, part) for part in parts]
        weights = torch.stack(rows).float()
        held = round_by_feedback(weights, feedback, stacked([grids[part] for part in parts]))
        for own, values in zip(rows, held, strict=True):
            own.copy_(values)


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
