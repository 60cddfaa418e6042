"""quantize_int8 in Triton-lang: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.integer import INT8_MAX, SMALLEST_AMAX, Int8Rows

_MAX = tl.constexpr(INT8_MAX)
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no room for a fraction


@triton.jit
def _quantize_int8_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    scale_ptr,
    x_row_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(scale_ptr)
        inverse = tl.div_rn(1.0 + tl.zeros_like(scale), scale)
    else:
        amax = tl.maximum(tl.max(tl.abs(x), axis=0), _SMALLEST)
        scale = tl.div_rn(amax, _MAX + tl.zeros_like(amax))
        inverse = tl.div_rn(_MAX + tl.zeros_like(amax), amax)
    rounded = tl.minimum(tl.maximum(x * inverse, -_MAX), _MAX)
    rounded = (rounded + _ROUNDER) - _ROUNDER
    tl.store(values_ptr + row * SIZE + columns, rounded.to(tl.int8), mask=mask)
    tl.store(scales_ptr + row, scale)


def quantize_int8(x: torch.Tensor, scale: torch.Tensor | None) -> Int8Rows:
    """See ops.quantize_int8."""
    num_rows, size = x.shape
    values = torch.empty((num_rows, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if x.numel():
        columns = triton.next_power_of_2(size)
        warps = min(max(columns // 512, 1), 16)
        static = x if scale is None else scale
        _quantize_int8_kernel[(num_rows,)](
            x, values, scales, static, x.stride(0), size, columns, scale is not None, num_warps=warps
        )
    return Int8Rows(values, scales, x.dtype)
