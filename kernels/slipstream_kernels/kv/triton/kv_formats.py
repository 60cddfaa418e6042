"""KV cache formats in Triton-lang: their codes, and loading tiles of rows as numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.kv_cache import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE
from slipstream_kernels.triton.interpreter import INTERPRETING

PLAIN, FP8, INT8, INT4 = (tl.constexpr(code) for code in range(4))
_CODES = {FP8_DTYPE: FP8.value, INT8_DTYPE: INT8.value, INT4_DTYPE: INT4.value}

# Probabilities are multiplied by the tokens' value scales before rounding to 16 bits; this factor keeps products with
# small scales (values of 0.01) out of fp16's subnormals.
VALUE_BOOST = tl.constexpr(64.0)


def kv_format(dtype: torch.dtype) -> int:
    """The code of a cache's format."""
    return _CODES.get(dtype, PLAIN.value)


@triton.jit
def load_rows(cache_ptr, first_row, num_rows, dtype: tl.constexpr, FORMAT: tl.constexpr,
              D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The stored values of BLOCK_N rows from first_row on, without scales: [BLOCK_N, BLOCK_D] of `dtype`.

    MASKED: rows from num_rows on are not loaded (a previous request may have left NaN) and give arbitrary finite
    values, as do dims past D.
    """
    columns = tl.arange(0, BLOCK_N)
    if FORMAT == INT4:
        WIDTH: tl.constexpr = D // 2
        elements = tl.arange(0, BLOCK_D // 2)
    else:
        WIDTH: tl.constexpr = D  # type: ignore[no-redef]  # one of the two is compiled
        elements = tl.arange(0, BLOCK_D)
    pointers = cache_ptr + first_row * WIDTH + (columns[:, None] * WIDTH + elements[None, :])
    if MASKED:
        stored = tl.load(pointers, mask=(columns < num_rows)[:, None] & (elements < WIDTH)[None, :], other=0.0)
    elif D == BLOCK_D:
        stored = tl.load(pointers)
    else:
        stored = tl.load(pointers, mask=(elements < WIDTH)[None, :], other=0.0)
    return _numbers(stored, dtype, FORMAT, BLOCK_N, BLOCK_D)


@triton.jit
def gather_rows(cache_ptr, rows, is_row, dtype: tl.constexpr, FORMAT: tl.constexpr,
                D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """load_rows for arbitrary rows, [BLOCK_N] int64.  Gives 0 where is_row is false and for dims past D."""
    WIDTH: tl.constexpr = D // 2 if FORMAT == INT4 else D
    elements = tl.arange(0, BLOCK_D // 2 if FORMAT == INT4 else BLOCK_D)
    mask = is_row[:, None] & (elements < WIDTH)[None, :]
    stored = tl.load(cache_ptr + rows[:, None] * WIDTH + elements[None, :], mask=mask, other=0.0)
    return _numbers(stored, dtype, FORMAT, BLOCK_N, BLOCK_D)


@triton.jit
def _numbers(stored, dtype: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stored elements of any type -> [BLOCK_N, BLOCK_D] of `dtype`."""
    if FORMAT == INT4:
        nibbles = tl.reshape(tl.join(stored & 15, stored >> 4), (BLOCK_N, BLOCK_D))
        stored = nibbles.to(tl.int8) - 8
    if INTERPRETING and FORMAT >= INT8:
        stored = stored.to(tl.float32)  # the interpreter reinterprets the bits of integers as bf16
    return stored.to(dtype)


@triton.jit
def token_scales(scale_ptr, first_row, num_rows, BLOCK_N: tl.constexpr):
    """The scales of BLOCK_N rows, 0 from num_rows on."""
    columns = tl.arange(0, BLOCK_N)
    return tl.load(scale_ptr + first_row + columns, mask=columns < num_rows, other=0.0)


@triton.jit
def head_scale(scale_ptr, kv_head, FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr):
    """The scale of all rows of a head: 1 unless fp8 has scales."""
    scale = 1.0
    if FORMAT == FP8 and HAS_SCALE:
        scale = tl.load(scale_ptr + kv_head)
    return scale


@triton.jit
def value_factor(scale_ptr, kv_head, FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr):
    """The factor on a sum of values at the end."""
    factor = head_scale(scale_ptr, kv_head, FORMAT, HAS_SCALE)
    if FORMAT >= INT8:
        factor = 1.0 / VALUE_BOOST
    return factor
