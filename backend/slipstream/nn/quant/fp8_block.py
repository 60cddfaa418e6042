"""FP8 weights scaled by blocks of 128 x 128, activations per token and 128 features: DeepSeek-V3's layout.

From unquantised checkpoints the weights are quantised on the device, one part at a time as it is loaded.
Source: arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.fp8 import E4M3_DTYPES, held_weight, quantised_weights
from slipstream.nn.quant.method import (
    CheckpointTensors,
    QuantMethod,
    StoredTensor,
    Weights,
    plain_tensors,
    register,
)
from slipstream.nn.stored_format import StoredFormat
from slipstream.nn.weight_slot import FLOAT_DTYPES

BLOCK = 128
METHOD = "block_wise_fp8"


@dataclass(frozen=True)
class BlockWiseFp8(QuantMethod):
    """stored: the layout of a block-wise FP8 checkpoint; None: the checkpoint is not quantised.

    weights: "weight" e4m3 [out, in], "scale" as ops.block_scales makes them, "counters", "bias" if any.
    """

    stored: StoredFormat | None = None

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return ops.fp8_refusal(device, dtype)

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        _require_whole_blocks(spec)
        return quantised_weights(spec, ops.block_scales(spec.out_features, spec.in_features, device), dtype)

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        tensors = plain_tensors(spec, rows)
        if self.stored is not None:
            tensors["weight"] = StoredTensor((rows, spec.in_features), E4M3_DTYPES, 0, 1)
            scales = (-(-rows // BLOCK), spec.in_features // BLOCK)
            tensors[self.stored.scale_name] = StoredTensor(scales, FLOAT_DTYPES, 0, 1, BLOCK, BLOCK)
        return tensors

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        if suffix == "bias":
            weights["bias"][rows].copy_(tensor)
        elif suffix != "weight":
            weights["scale"][blocks, : tensor.shape[1]].copy_(tensor)
        elif self.stored is not None:
            weights["weight"][rows].copy_(tensor)
        else:
            values, scales = ops.quantize_fp8_blocks(tensor.to(weights["weight"].device))
            weights["weight"][rows].copy_(values)
            weights["scale"][blocks, : scales.shape[1]].copy_(scales)

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        return held_weight(weights, num_experts)


def _require_whole_blocks(spec: LinearSpec) -> None:
    """A block must lie within one part (the last may end inside a block). Raises ConfigError that names the part."""
    if spec.in_features % BLOCK:
        raise ConfigError(
            "quantization", METHOD, f"{spec.title} has {spec.in_features} inputs, not a multiple of {BLOCK}"
        )
    for name, rows in spec.parts[:-1]:
        if rows % BLOCK:
            raise ConfigError("quantization", METHOD, f"{name} has {rows} outputs, not a multiple of {BLOCK}")


register(METHOD, BlockWiseFp8(), free_tokens=186, reads=BlockWiseFp8)
