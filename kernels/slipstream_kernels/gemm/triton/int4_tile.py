"""A tile of a product of canonical 4-bit weights in Triton-lang, for int4_mm and for the experts' grouped_int4_mm.

Even and odd input features are two products, because a byte holds one of each: nothing is shuffled.  Codes less
zero points are exact in every float type, and so is e4m3 in bf16: FP8 rows are multiplied in bf16.  MXFP4's scales are
powers of two, with which weights stay exact in bf16 and fp32: they need no sums of their own for a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import SYMMETRIC_ZERO, Int4Weight
from slipstream_kernels.triton.interpreter import dot

BLOCK_N, MAX_BLOCK_K = 64, 128  # ops.int4_mm refuses groups that cross blocks
MIN_ROWS, MAX_ROWS = 16, 64
_SYMMETRIC_ZERO = tl.constexpr(SYMMETRIC_ZERO)


def block_k(weight: Int4Weight) -> int:
    """Input features of an iteration of the loop.  Its sums have one scale, unless scales are applied to weights."""
    if weight.is_e2m1 or weight.group_size not in (32, 64):
        return MAX_BLOCK_K
    return weight.group_size


def factor_type(x: torch.Tensor | Fp8Rows, weight: Int4Weight) -> tl.dtype:
    """The type in which weights and activations are multiplied.  fp16 lacks the range of MXFP4's scales."""
    if isinstance(x, Fp8Rows):
        return tl.bfloat16
    of_half = tl.float32 if weight.is_e2m1 else tl.float16
    return {torch.float32: tl.float32, torch.float16: of_half}.get(x.dtype, tl.bfloat16)


@triton.jit
def e2m1_value(codes):
    """The fp32 numbers of e2m1 codes, int32."""
    exponents, mantissas = (codes >> 1) & 3, codes & 1
    halves = tl.where(exponents == 0, mantissas, (2 + mantissas) << tl.maximum(exponents - 1, 0))
    return tl.where(codes >= 8, -halves, halves).to(tl.float32) * 0.5


@triton.jit
def e8m0_value(exponents):
    """2^(exponents - 127) as fp32, of int32 from 0 to 254."""
    return tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def multiply_tile(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    weight_rows,
    feature_mask,
    x_rows,
    row_mask,
    IN_FEATURES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] in fp32.  weight_rows: int64 [BLOCK_N].  x_rows: pointers to rows, [1, BLOCK_M]."""
    packed_rows = packed_ptr + weight_rows[:, None] * (IN_FEATURES // 2)
    groups = weight_rows * (IN_FEATURES // GROUP_SIZE)
    pairs = tl.arange(0, BLOCK_K // 2)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        places = start // 2 + pairs
        inside = places < IN_FEATURES // 2
        codes = tl.load(packed_rows + places[None, :], mask=feature_mask[:, None] & inside[None, :], other=0)
        x_mask = row_mask[None, :] & inside[:, None]
        even = tl.load(x_rows + 2 * places[:, None], mask=x_mask, other=0.0).to(tl.float32).to(FACTOR)
        odd = tl.load(x_rows + 2 * places[:, None] + 1, mask=x_mask, other=0.0).to(tl.float32).to(FACTOR)
        if IS_E2M1:
            group = groups[:, None] + (2 * places // GROUP_SIZE)[None, :]
            exponents = tl.load(scales_ptr + group, mask=feature_mask[:, None] & inside[None, :], other=0)
            scales = e8m0_value(exponents.to(tl.int32))
            low = (e2m1_value((codes & 15).to(tl.int32)) * scales).to(FACTOR)
            high = (e2m1_value((codes >> 4).to(tl.int32)) * scales).to(FACTOR)
            acc += dot(low, even) + dot(high, odd)
        else:
            group = groups + start // GROUP_SIZE
            zeros = tl.full((BLOCK_N,), _SYMMETRIC_ZERO, tl.int32)
            if HAS_ZEROS:
                zeros = tl.load(zeros_ptr + group, mask=feature_mask, other=0).to(tl.int32)
            low = ((codes & 15).to(tl.int32) - zeros[:, None]).to(tl.float32).to(FACTOR)
            high = ((codes >> 4).to(tl.int32) - zeros[:, None]).to(tl.float32).to(FACTOR)
            scales = tl.load(scales_ptr + group, mask=feature_mask, other=0.0)
            acc += (dot(low, even) + dot(high, odd)) * scales[:, None]
    return acc
