"""int8 weights as repack_int8 made them, written out in 16 bits: for products of so many rows that this pays."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

RUNS = 256  # of 16 columns, of a program


@triton.jit
def _int8_dequantise_kernel(words_ptr, scales_ptr, out_ptr, ROW_RUNS: tl.constexpr, RUNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    runs = (tl.program_id(1) * RUNS + tl.arange(0, RUNS))[:, None]
    inside = runs < ROW_RUNS
    words = tl.load(words_ptr + row * ROW_RUNS * 4 + runs * 4 + tl.arange(0, 4)[None, :], mask=inside, other=0)
    scale = tl.load(scales_ptr + row)
    out = out_ptr + row * ROW_RUNS * 16 + runs * 16 + tl.arange(0, 8)[None, :]
    dtype = out_ptr.dtype.element_ty
    # Bytes 0 and 2 of the four words are the run's first eight columns, bytes 1 and 3 the others.
    first = tl.reshape(tl.join((words << 24) >> 24, (words << 8) >> 24), (RUNS, 8))
    second = tl.reshape(tl.join((words << 16) >> 24, words >> 24), (RUNS, 8))
    tl.store(out, (first.to(tl.float32) * scale).to(dtype), mask=inside)
    tl.store(out + 8, (second.to(tl.float32) * scale).to(dtype), mask=inside)


def int8_dequantise(words: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[out_features, in_features] of `dtype` of repacked words int32 [out_features, in_features / 4]."""
    out_features, row_words = words.shape
    out = torch.empty((out_features, 4 * row_words), dtype=dtype, device=words.device)
    grid = (out_features, triton.cdiv(row_words // 4, RUNS))
    _int8_dequantise_kernel[grid](words, scales, out, ROW_RUNS=row_words // 4, RUNS=RUNS, num_warps=8)
    return out
