"""int4_mm in Triton-lang, for GPUs and shapes that have no kernel of their own: canonical weights, one tile a program.

Even and odd input features are two products, because a byte holds one of each: nothing is shuffled. Codes less
zero-points are exact in every float type, and so is e4m3 in bf16: FP8 rows are multiplied in bf16.
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


@triton.jit
def _int4_mm_kernel(
    x_ptr,
    x_scales_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    x_row_stride,
    num_tokens,
    out_features,
    IN_FEATURES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature_mask, token_mask = features < out_features, tokens < num_tokens
    pairs = tl.arange(0, BLOCK_K // 2)
    packed_rows = packed_ptr + features.to(tl.int64)[:, None] * (IN_FEATURES // 2)
    groups = features.to(tl.int64) * (IN_FEATURES // GROUP_SIZE)
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_row_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        places = start // 2 + pairs
        inside = places < IN_FEATURES // 2
        codes = tl.load(packed_rows + places[None, :], mask=feature_mask[:, None] & inside[None, :], other=0)
        x_mask = token_mask[None, :] & inside[:, None]
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
    if HAS_X_SCALES:
        acc *= tl.load(x_scales_ptr + tokens, mask=token_mask, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + features, mask=feature_mask, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + tokens.to(tl.int64)[None, :] * out_features + features[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=feature_mask[:, None] & token_mask[None, :])


def int4_mm(x: torch.Tensor | Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ops.int4_mm."""
    rows, num_tokens = (x.values, x.num_tokens) if isinstance(x, Fp8Rows) else (x, x.shape[0])
    out = torch.empty((num_tokens, weight.out_features), dtype=x.dtype, device=rows.device)
    if not num_tokens:
        return out
    block_m = min(max(triton.next_power_of_2(num_tokens), MIN_ROWS), MAX_ROWS)
    grid = (triton.cdiv(weight.out_features, BLOCK_N), triton.cdiv(num_tokens, block_m))
    factor = {torch.float32: tl.float32, torch.float16: tl.float16}.get(x.dtype, tl.bfloat16)
    _int4_mm_kernel[grid](
        rows,
        x.scales if isinstance(x, Fp8Rows) else out,
        weight.packed,
        weight.scales,
        out if weight.zeros is None else weight.zeros,
        out if bias is None else bias,
        out,
        rows.stride(0),
        num_tokens,
        weight.out_features,
        IN_FEATURES=weight.in_features,
        GROUP_SIZE=weight.group_size,
        HAS_X_SCALES=isinstance(x, Fp8Rows),
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=min(weight.group_size, MAX_BLOCK_K) if weight.group_size in (32, 64) else MAX_BLOCK_K,
        FACTOR=tl.bfloat16 if isinstance(x, Fp8Rows) else factor,
        num_warps=4,
    )
    return out
