"""gated_mul_fp8 in Triton-lang: a program computes a whole row, or several groups of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme, empty_rows
from slipstream_kernels.gemm.triton.quantize_fp8 import (
    GROUPS_PER_PROGRAM,
    activation_sums_of,
    store_rows,
    tile_columns,
    tile_constants,
)
from slipstream_kernels.norm.triton.gated_mul import activate
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _gated_mul_fp8_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    scale_ptr,
    sums_ptr,
    x_row_stride,
    num_rows,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_STATIC: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, mask = tile_columns(chunk, SIZE, GROUPS, COLUMNS)
    dtype = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row_stride + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    activated = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    y = (activated * up).to(dtype).to(tl.float32)
    store_rows(
        y, row, chunk, columns, mask, values_ptr, scales_ptr, scale_ptr, sums_ptr, num_rows, SIZE, NUM_GROUPS,
        IS_STATIC, SUM_COLUMNS,
    )  # fmt: skip


def gated_mul_fp8(x: torch.Tensor, activation: str, scheme: Fp8Scheme) -> Fp8Rows:
    """See ops.gated_mul_fp8."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    rows = empty_rows(num_tokens, size, scheme, x)
    if rows.values.numel():
        scale = x if scheme.scale is None else scheme.scale
        tile = tile_constants(size, scheme, rows, GROUPS_PER_PROGRAM)
        grid = (num_tokens, triton.cdiv(tile["NUM_GROUPS"], tile["GROUPS"]))
        options = {"ACTIVATION": activation, **tile, **dependent_launch(x.device)}
        out = rows.values, rows.scales, scale, activation_sums_of(rows)
        _gated_mul_fp8_kernel[grid](x, *out, x.stride(0), rows.values.shape[0], **options)
    return rows
