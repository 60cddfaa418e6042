"""MXFP4: weights e2m1 with one power of two per 32 input features, as gpt-oss stores its experts.

They are written out in the model's dtype as they are loaded, which bfloat16 and float32 do exactly: 16 bits of memory
and of traffic a weight, not 4. Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.method import CheckpointTensors, StoredTensor, Weights, plain_tensors, register
from slipstream.nn.quant.unquantized import Unquantized
from slipstream.nn.stored_format import StoredFormat

NAME, GROUP = "mxfp4", 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same, negative
BIAS, LARGEST_EXPONENT = 127, 2  # of the scales; of 6, the largest e2m1
NOT_A_NUMBER = 255


class RoundedToMXFP4(Unquantized):
    """Weights that are rounded as they are loaded."""

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        if spec.in_features % GROUP:
            raise ConfigError("quantization", NAME, f"{spec.in_features} input features are not a multiple of {GROUP}")
        return super().create_weights(spec, device, dtype)

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        super().load(weights, suffix, rows, _rounded(tensor) if suffix == "weight" else tensor)


class StoredMXFP4(RoundedToMXFP4):
    """Weights that are stored so: two e2m1 a byte, the first in its low bits, and scales e8m0.

    weights: those of Unquantized, and what waits for the other of blocks and scales, by name and first row.
    """

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        groups = spec.in_features // GROUP
        stored = {
            "blocks": StoredTensor((rows, groups, GROUP // 2), ("U8",), 0, 1, columns_unit=GROUP),
            "scales": StoredTensor((rows, groups), ("U8",), 0, 1, columns_unit=GROUP),
        }
        plain = plain_tensors(spec, rows)
        return {**stored, **{suffix: tensor for suffix, tensor in plain.items() if suffix != "weight"}}

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        if suffix == "bias":
            return super().load(weights, suffix, rows, tensor)
        if suffix == "scales" and bool((tensor == NOT_A_NUMBER).any()):
            raise ValueError("is not finite")
        other = weights.pop(f"{'scales' if suffix == 'blocks' else 'blocks'} {rows.start}", None)
        if other is None:
            weights[f"{suffix} {rows.start}"] = tensor
            return None
        blocks, scales = (tensor, other) if suffix == "blocks" else (other, tensor)
        return Unquantized.load(self, weights, "weight", rows, dequantized(blocks, scales))


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: [rows, groups, 16], scales: [rows, groups], uint8 -> [rows, groups * 32] fp32, exact."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = table[codes.long()]
    return torch.ldexp(values, scales.to(torch.int32)[..., None] - BIAS).flatten(1)


def _rounded(weight: Tensor) -> Tensor:
    """Each group's scale is such that its largest value is from 4 to 8, which e2m1 has up to 6."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    exponents = torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT
    scaled = torch.ldexp(groups, -exponents)
    table = torch.tensor(E2M1, device=weight.device)
    borders = (table[1:] + table[:-1]) / 2
    values = table[torch.bucketize(scaled.abs().contiguous(), borders)].copysign(scaled)
    return torch.ldexp(values, exponents).flatten(1)


def _read_config(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    """Of such a checkpoint only experts are stored so, whatever modules_to_not_convert leaves out besides."""
    return StoredFormat(NAME, "block", "scales") if any(".experts." in module for module in modules) else None


register(NAME, RoundedToMXFP4(), 184, lambda stored: StoredMXFP4(), {NAME: _read_config})
