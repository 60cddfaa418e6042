"""quantize_fp8 in Triton-lang: one program per row; and the tile function that the fused kernels end with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import E4M3_MAX, SMALLEST_AMAX, SUM_TILE_ROWS, Fp8Rows, Fp8Scheme, empty_rows
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel

_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_SUM_TILE_ROWS = tl.constexpr(SUM_TILE_ROWS)
# Groups need nothing of each other: programs of 2048 columns, so that a few rows spread over the chip too.
GROUPS_PER_PROGRAM = 16


@triton.jit
def quantize_tile(y, scale_ptr, IS_STATIC: tl.constexpr):
    """y: [groups, columns] fp32 -> (e4m3 of that shape, scales [groups])."""
    if IS_STATIC:
        scales = tl.load(scale_ptr) + tl.zeros((y.shape[0],), tl.float32)
        inverse = tl.div_rn(1.0 + tl.zeros((y.shape[0],), tl.float32), scales)
    else:
        amax = tl.maximum(tl.max(tl.abs(y), axis=1), _SMALLEST)
        scales = tl.div_rn(amax, _MAX + tl.zeros_like(amax))
        inverse = tl.div_rn(_MAX + tl.zeros_like(amax), amax)
    values = tl.minimum(tl.maximum(y * inverse[:, None], -_MAX), _MAX)
    return to_e4m3(values), scales


@triton.jit
def tile_columns(chunk, SIZE: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """(columns [GROUPS, COLUMNS] of a row, which of them exist): groups are consecutive runs of COLUMNS columns."""
    columns = (chunk * GROUPS + tl.arange(0, GROUPS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return columns, columns < SIZE


@triton.jit
def store_rows(
    y,
    row,
    chunk,
    columns,
    mask,
    values_ptr,
    scales_ptr,
    scale_ptr,
    sums_ptr,
    num_rows,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    IS_STATIC: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
):
    """Quantise a row; write its values, scales and activation sums, the latter two column-major."""
    values, scales = quantize_tile(y, scale_ptr, IS_STATIC)
    tl.store(values_ptr + row * SIZE + columns, values, mask=mask)
    groups = chunk * y.shape[0] + tl.arange(0, y.shape[0])
    tl.store(scales_ptr + groups.to(tl.int64) * num_rows + row, scales, mask=groups < NUM_GROUPS)
    if SUM_COLUMNS:
        runs = tl.reshape(values.to(tl.float32), (y.shape[0] * y.shape[1] // SUM_COLUMNS, SUM_COLUMNS))
        groups = tl.arange(0, y.shape[0] * y.shape[1] // SUM_COLUMNS)
        first = row // _SUM_TILE_ROWS * (SIZE // SUM_COLUMNS)
        sums = sums_ptr + (first + groups) * _SUM_TILE_ROWS + row % _SUM_TILE_ROWS
        tl.store(sums, tl.sum(runs, axis=1), mask=groups < SIZE // SUM_COLUMNS)


@step_kernel
def _quantize_fp8_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    scale_ptr,
    sums_ptr,
    x_row_stride,
    num_rows,
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
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    store_rows(
        x, row, chunk, columns, mask, values_ptr, scales_ptr, scale_ptr, sums_ptr, num_rows, SIZE, NUM_GROUPS,
        IS_STATIC, SUM_COLUMNS,
    )  # fmt: skip


def activation_sums_of(rows: Fp8Rows) -> torch.Tensor:
    """Where a kernel writes sums; any tensor if it writes none."""
    return rows.values if rows.activation_sums is None else rows.activation_sums


def tile_constants(size: int, scheme: Fp8Scheme, rows: Fp8Rows, max_groups: int) -> dict[str, int | bool]:
    """The constants of a kernel that quantises rows of `size` columns, and its number of warps."""
    num_groups = scheme.num_groups(size)
    columns = scheme.group_size or triton.next_power_of_2(size)
    groups = min(triton.next_power_of_2(num_groups), max_groups)
    return {
        "SIZE": size,
        "NUM_GROUPS": num_groups,
        "GROUPS": groups,
        "COLUMNS": columns,
        "IS_STATIC": scheme.scale is not None,
        "SUM_COLUMNS": 0 if rows.activation_sums is None else scheme.sum_columns,
        "num_warps": min(max(groups * columns // 512, 1), 32),
    }


def quantize_fp8(x: torch.Tensor, scheme: Fp8Scheme) -> Fp8Rows:
    """See ops.quantize_fp8."""
    num_tokens, size = x.shape
    rows = empty_rows(num_tokens, size, scheme, x)
    if x.numel():
        scale = x if scheme.scale is None else scheme.scale
        tile = tile_constants(size, scheme, rows, GROUPS_PER_PROGRAM)
        grid = (num_tokens, triton.cdiv(tile["NUM_GROUPS"], tile["GROUPS"]))
        options = {**tile, **dependent_launch(x.device)}
        out = rows.values, rows.scales, scale, activation_sums_of(rows)
        _quantize_fp8_kernel[grid](x, *out, x.stride(0), rows.values.shape[0], **options)
    return rows
