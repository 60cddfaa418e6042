"""quantize_int4, quantize_int8_weight: contract.  Weights to integers, once per weight, in torch on every device."""

from __future__ import annotations

import torch

from slipstream_kernels.gemm.reference import quantize_int4 as reference
from slipstream_kernels.integer import Int4Weight, Int8Rows
from slipstream_kernels.select import require_float


def quantize_int4(
    weight: torch.Tensor, group_size: int, *, has_zeros: bool = False, importance: torch.Tensor | None = None
) -> Int4Weight:
    """Quantise each group of a row to 4 bits by the scale, out of a grid below its range's, of least squared error.

    weight: [out_features, in_features], any float dtype.  group_size: divides in_features; 0 is one group a row.
    has_zeros: codes span [smallest, largest] with a zero-point; without, codes -8..7 times a scale, which is negative
    where that lets the largest magnitude be code -8.  importance: [in_features] fp32, weights of the squared errors
    (mean squares of the inputs).  The result is canonical.
    """
    _require_weight(weight)
    if weight.shape[1] % 2 or group_size < 0 or (group_size and weight.shape[1] % group_size):
        raise ValueError(f"group_size: {group_size} does not divide an even number of columns: {weight.shape[1]}")
    return reference.quantize_int4(weight, group_size or weight.shape[1], has_zeros, importance)


def quantize_int8_weight(weight: torch.Tensor) -> Int8Rows:
    """Quantise each row to int8 by the scale, out of a grid below amax / 127, of least squared error."""
    _require_weight(weight)
    return reference.quantize_int8_weight(weight)


def dequantize_int4(weight: Int4Weight) -> torch.Tensor:
    """[out_features, in_features] fp32 of a canonical weight."""
    return reference.dequantize_int4(weight)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] of two codes each -> uint8 [..., 2 n], low nibbles first."""
    return reference.unpack_int4(packed)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., 2 n] -> uint8 [..., n], even positions in low nibbles."""
    return reference.pack_int4(codes)


def _require_weight(weight: torch.Tensor) -> None:
    require_float("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected [out_features, in_features]")
