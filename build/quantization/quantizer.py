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
            self._scale(layer)
            grids = {}
            for linear in layer.linears():
                grids[linear] = self._round(layer, linear)
            ranges = _KvRanges()
            if self.walk is not None:
                self.walk.pass_on(layer, ranges.look)
            for linear, grid_of_part in grids.items():
                for part, grid in grid_of_part.items():
                    yield part, index, self._stored(linear, part, grid)
            if self.plan.with_kv_scales:
                yield "attention", index, ranges.scales()
        if self.plan.with_head and isinstance(self.decoder.lm_head, Linear):
            yield "lm_head", 0, self._head(self.decoder.lm_head)

    def _scale(self, layer: DecoderLayer) -> None:
        """Fold AWQ's or SmoothQuant's factors in, from the last linear to the first: each changes rows before it."""
        if self.walk is None or not {"awq", "smoothquant"} & set(self.plan.algorithms):
            return
        for linear in reversed(layer.linears()):
            inputs = self.walk.record(layer, linear)
            weight = linear.weights["weight"].float()
            factors = self._factors(layer, linear, weight, inputs)
            fold(self.decoder.spec, layer, linear, factors.to(linear.weights["weight"].dtype))

    def _factors(self, layer: DecoderLayer, linear: Linear, weight: Tensor, inputs: InputStatistics) -> Tensor:
        def common(factors: Tensor) -> Tensor:
            return shared(self.decoder.spec, layer, linear, factors)

        if "smoothquant" in self.plan.algorithms:
            return common(smoothing_factors(weight, inputs, self.plan.smoothing))
        every = torch.arange(weight.shape[1], device=weight.device)

        def quantised(scaled: Tensor, seen: InputStatistics) -> Tensor:
            return self._grid(scaled, seen).nearest(every, scaled)

        return awq_factors(weight, inputs, quantised, common)

    def _round(self, layer: DecoderLayer, linear: Linear) -> dict[str, Grid]:
        """Put the linear's weights onto grids, one per part, on the inputs that the layer's linears before it give."""
        has_feedback = self.walk is not None and "gptq" in self.plan.algorithms
        inputs = self.walk.record(layer, linear) if self.walk is not None and self.plan.algorithms else None
        grids = {}
        for part, _ in linear.spec.parts:
            rows = linear.weights["weight"][rows_of(linear, part)]
            weight = rows.float()
            grids[part] = self._grid(weight, inputs)
            if has_feedback and inputs is not None:
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
