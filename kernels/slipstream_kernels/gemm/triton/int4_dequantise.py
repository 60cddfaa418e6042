"""Canonical 4-bit weights written out in 16 bits: for products of so many rows that this pays.

A program takes bytes of one row, in units whose weights share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.integer import SYMMETRIC_ZERO, Int4Weight
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import round_to

BLOCK_BYTES = 2048  # of a program; a byte has two weights
MOST_UNIT_BYTES = 64  # of a unit
_SYMMETRIC_ZERO = tl.constexpr(SYMMETRIC_ZERO)


@triton.jit
def _int4_dequantise_kernel(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    ROW_BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    begins = ((tl.program_id(1) * UNITS + tl.arange(0, UNITS)) * UNIT)[:, None]
    inside = begins < ROW_BYTES
    codes = tl.load(packed_ptr + row * ROW_BYTES + begins + tl.arange(0, UNIT)[None, :], mask=inside, other=0)
    groups = row * (ROW_BYTES // GROUP_BYTES) + begins // GROUP_BYTES
    scales = tl.load(scales_ptr + groups, mask=inside, other=0.0)
    zeros = tl.full((UNITS, 1), _SYMMETRIC_ZERO, tl.int32)
    if HAS_ZEROS:
        zeros = tl.load(zeros_ptr + groups, mask=inside, other=0).to(tl.int32)
    low = ((codes & 15).to(tl.int32) - zeros).to(tl.float32) * scales
    high = ((codes >> 4).to(tl.int32) - zeros).to(tl.float32) * scales
    out = out_ptr + 2 * row * ROW_BYTES + 2 * begins + tl.arange(0, 2 * UNIT)[None, :]
    tl.store(out, round_to(tl.interleave(low, high), out_ptr.dtype.element_ty), mask=inside)


def int4_dequantise(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out_features, in_features] of bf16 or fp16 of a canonical weight, of experts one below the other.

    Groups have an even number of input features; e2m1 weights: dequantise_mxfp4.
    """
    row_bytes, group_bytes = weight.in_features // 2, weight.group_size // 2
    unit = min(group_bytes & -group_bytes, MOST_UNIT_BYTES)  # the largest power of two that divides a group
    block = min(triton.next_power_of_2(row_bytes), BLOCK_BYTES)
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.packed.device)
    _int4_dequantise_kernel[(weight.out_features, triton.cdiv(row_bytes, block))](
        weight.packed,
        weight.scales,
        out if weight.zeros is None else weight.zeros,
        out,
        ROW_BYTES=row_bytes,
        GROUP_BYTES=group_bytes,
        UNIT=unit,
        UNITS=block // unit,
        HAS_ZEROS=weight.zeros is not None,
        **dependent_launch(out.device),
    )
    return out
