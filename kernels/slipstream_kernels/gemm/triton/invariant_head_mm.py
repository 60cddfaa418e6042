"""invariant_head_mm in Triton-lang: invariant_mm's sums and tiles, head by head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.gemm.triton.invariant_mm import EXACT, SPAN, choose_tile, sum_parts
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _invariant_head_mm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    weight_feature_stride,
    weight_column_stride,
    out_token_stride,
    out_head_stride,
    num_tokens,
    out_features,
    IN_FEATURES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of tokens, tiles of features, heads)."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns, head = tl.arange(0, BLOCK_K), tl.program_id(2).to(tl.int64)
    feature_mask, token_mask = features < out_features, tokens < num_tokens
    own_weight = weight_ptr + head * weight_head_stride
    weight_rows = own_weight + features[:, None] * weight_feature_stride + columns[None, :] * weight_column_stride
    x_rows = x_ptr + head * x_head_stride + tokens.to(tl.int64)[None, :] * x_token_stride + columns[:, None]
    total = sum_parts(
        weight_rows, x_rows, weight_column_stride, feature_mask, token_mask, 0, IN_FEATURES, IN_FEATURES, False, SPAN,
        BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    out = out_ptr + head * out_head_stride + tokens.to(tl.int64)[None, :] * out_token_stride + features[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=feature_mask[:, None] & token_mask[None, :])


def invariant_head_mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ops.invariant_head_mm."""
    num_tokens, (num_heads, out_features, in_features) = x.shape[0], weight.shape
    if not num_tokens:
        return
    tile = choose_tile(num_tokens, x.dtype)
    grid = (triton.cdiv(num_tokens, tile.block_m), triton.cdiv(out_features, tile.block_n), num_heads)
    _invariant_head_mm_kernel[grid](
        x, weight, out, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1), num_tokens,
        out_features, IN_FEATURES=in_features, SPAN=SPAN, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, NUM_STAGES=tile.num_stages, num_warps=tile.num_warps, **EXACT,
        **dependent_launch(x.device),
    )  # fmt: skip
