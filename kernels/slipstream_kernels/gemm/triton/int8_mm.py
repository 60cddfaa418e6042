"""int8_mm in Triton-lang: few int8 rows by scaled_mm's kernel, all others by one tile a program, without split sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.gemm.triton import scaled_mm
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.triton.interpreter import INTERPRETING, dot
from slipstream_kernels.triton.step_kernel import step_kernel

BLOCK_N, BLOCK_K = 64, 128
MIN_ROWS, MAX_ROWS = 16, 64


@step_kernel
def _int8_mm_kernel(
    x_ptr,
    x_scales_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    x_row_stride,
    num_tokens,
    out_features,
    IN_FEATURES: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature_mask, token_mask = features < out_features, tokens < num_tokens
    columns = tl.arange(0, BLOCK_K)
    weight_rows = values_ptr + features.to(tl.int64)[:, None] * IN_FEATURES
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_row_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT8 else tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        places = start + columns
        inside = places < IN_FEATURES
        w = tl.load(weight_rows + places[None, :], mask=feature_mask[:, None] & inside[None, :], other=0)
        x = tl.load(x_rows + places[:, None], mask=token_mask[None, :] & inside[:, None], other=0)
        if not IS_INT8:
            acc += dot(w.to(tl.float32).to(x.dtype), x)  # the interpreter cannot make bf16 of integers
        elif INTERPRETING:  # fp32 holds the sum of 128 products exactly
            acc += dot(w, x).to(tl.int32)
        else:
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    y = acc.to(tl.float32)
    scales = tl.load(scales_ptr + features, mask=feature_mask, other=0.0)[:, None]
    if IS_INT8:
        scales = scales * tl.load(x_scales_ptr + tokens, mask=token_mask, other=0.0)[None, :]
    y *= scales
    if HAS_BIAS:
        y += tl.load(bias_ptr + features, mask=feature_mask, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + tokens.to(tl.int64)[None, :] * out_features + features[:, None]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=feature_mask[:, None] & token_mask[None, :])


def int8_mm(
    x: torch.Tensor | Int8Rows,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.int8_mm."""
    if isinstance(x, Int8Rows) and x.num_tokens <= scaled_mm.MAX_ROWS and x.values.is_contiguous():
        return scaled_mm.scaled_mm(x, values, scales, bias, counters)
    rows = x.values if isinstance(x, Int8Rows) else x
    num_tokens, (out_features, in_features) = rows.shape[0], values.shape
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=rows.device)
    if not num_tokens:
        return out
    block_m = min(max(triton.next_power_of_2(num_tokens), MIN_ROWS), MAX_ROWS)
    _int8_mm_kernel[triton.cdiv(out_features, BLOCK_N), triton.cdiv(num_tokens, block_m)](
        rows,
        x.scales if isinstance(x, Int8Rows) else out,
        values,
        scales,
        out if bias is None else bias,
        out,
        rows.stride(0),
        num_tokens,
        out_features,
        IN_FEATURES=in_features,
        IS_INT8=isinstance(x, Int8Rows),
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
    )
    return out
