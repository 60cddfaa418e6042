"""Writes MXFP4 weights as bf16, exactly, which pays for many rows of a product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.gemm.triton.int4_tile import e2m1_value, e8m0_value
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents

BLOCK_BYTES = 2048  # of a program; a byte has two weights


@triton.jit
def _dequantise_mxfp4_kernel(
    packed_ptr,
    scales_ptr,
    out_ptr,
    num_bytes,
    GROUP_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    places = begin + tl.arange(0, BLOCK)
    codes = tl.load(packed_ptr + places, mask=places < num_bytes, other=0).to(tl.int32)
    # Rows are whole groups, so that groups are counted through.
    exponents = tl.load(scales_ptr + places // GROUP_BYTES, mask=places < num_bytes, other=0)
    scales = e8m0_value(exponents.to(tl.int32))
    values = tl.interleave(e2m1_value(codes & 15) * scales, e2m1_value(codes >> 4) * scales)
    features = 2 * begin + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + features, values.to(out_ptr.dtype.element_ty), mask=features < 2 * num_bytes.to(tl.int64))


def dequantise_mxfp4(weight: Int4Weight) -> torch.Tensor:
    """[out_features of all experts, in_features] bf16 of canonical MXFP4 weights."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=torch.bfloat16, device=weight.packed.device)
    _dequantise_mxfp4_kernel[(triton.cdiv(weight.packed.numel(), BLOCK_BYTES),)](
        weight.packed,
        weight.scales,
        out,
        weight.packed.numel(),
        GROUP_BYTES=weight.group_size // 2,
        BLOCK=BLOCK_BYTES,
        **dependent_launch(out.device),
    )
    return out
