"""rms_norm_fp8 in Triton-lang: one program per row; sum, norm and quantisation in one pass over memory."""

from __future__ import annotations

import torch
import triton.language as tl

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme, empty_rows
from slipstream_kernels.gemm.triton.quantize_fp8 import activation_sums_of, store_rows, tile_columns, tile_constants
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _rms_norm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    summed_ptr,
    values_ptr,
    scales_ptr,
    scale_ptr,
    sums_ptr,
    x_row_stride,
    residual_row_stride,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_STATIC: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns, mask = tile_columns(0, SIZE, GROUPS, COLUMNS)
    dtype = summed_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_previous(DEPENDENT)
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = (x + residual).to(dtype)
        tl.store(summed_ptr + row * SIZE + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / SIZE + eps)
    y = (scaled.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    store_rows(
        y, row, 0, columns, mask, values_ptr, scales_ptr, scale_ptr, sums_ptr, num_rows, SIZE, NUM_GROUPS,
        IS_STATIC, SUM_COLUMNS,
    )  # fmt: skip


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, scheme: Fp8Scheme
) -> tuple[Fp8Rows, torch.Tensor]:
    """See ops.rms_norm_fp8."""
    num_tokens, size = x.shape
    rows = empty_rows(num_tokens, size, scheme, x)
    added = x if residual is None else residual
    summed = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _rms_norm_fp8_kernel[(num_tokens,)](
            x,
            added,
            weight,
            summed,
            rows.values,
            rows.scales,
            x if scheme.scale is None else scheme.scale,
            activation_sums_of(rows),
            x.stride(0),
            added.stride(0),
            rows.values.shape[0],
            eps,
            HAS_RESIDUAL=residual is not None,
            **tile_constants(size, scheme, rows, max_groups=size),
            **dependent_launch(x.device),
        )
    return rows, summed
