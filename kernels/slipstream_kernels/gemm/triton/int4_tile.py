"""A tile of a product of canonical 4-bit weights in Triton-lang, for int4_mm and for the experts' grouped_int4_mm.

Even and odd input features are two products, because a byte holds one of each: nothing is shuffled. Codes less
zero-points are exact in every float type, and so is e4m3 in bf16: FP8 rows are multiplied in bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import SYMMETRIC_ZERO
from slipstream_kernels.triton.interpreter import dot

BLOCK_N, MAX_BLOCK_K = 64, 128  # ops.int4_mm refuses groups that cross blocks
MIN_ROWS, MAX_ROWS = 16, 64
_SYMMETRIC_ZERO = tl.constexpr(SYMMETRIC_ZERO)


def block_k(group_size: int) -> int:
    """How many input features a turn of the loop takes: never of two groups."""
    return min(group_size, MAX_BLOCK_K) if group_size in (32, 64) else MAX_BLOCK_K


def factor_type(x: torch.Tensor | Fp8Rows) -> tl.dtype:
    """In what codes and activations are multiplied."""
    if isinstance(x, Fp8Rows):
        return tl.bfloat16
    return {torch.float32: tl.float32, torch.float16: tl.float16}.get(x.dtype, tl.bfloat16)


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
        group = groups + start // GROUP_SIZE
        zeros = tl.full((BLOCK_N,), _SYMMETRIC_ZERO, tl.int32)
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + group, mask=feature_mask, other=0).to(tl.int32)
        low = ((codes & 15).to(tl.int32) - zeros[:, None]).to(tl.float32).to(FACTOR)
        high = ((codes >> 4).to(tl.int32) - zeros[:, None]).to(tl.float32).to(FACTOR)
        scales = tl.load(scales_ptr + group, mask=feature_mask, other=0.0)
        acc += (dot(low, even) + dot(high, odd)) * scales[:, None]
    return acc
