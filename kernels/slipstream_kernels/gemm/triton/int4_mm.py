"""int4_mm in Triton-lang, for GPUs and shapes that have no kernel of their own: canonical weights, a tile a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.triton.int4_tile import BLOCK_N, MAX_ROWS, MIN_ROWS, block_k, factor_type, multiply_tile
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
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
    IS_E2M1: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature_mask, token_mask = features < out_features, tokens < num_tokens
    weight_rows = features.to(tl.int64)
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_row_stride
    acc = multiply_tile(
        packed_ptr,
        scales_ptr,
        zeros_ptr,
        weight_rows,
        feature_mask,
        x_rows,
        token_mask,
        IN_FEATURES,
        GROUP_SIZE,
        HAS_ZEROS,
        IS_E2M1,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        FACTOR,
    )
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
        IS_E2M1=weight.is_e2m1,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k(weight),
        FACTOR=factor_type(x, weight),
        num_warps=4,
    )
    return out
