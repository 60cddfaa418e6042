"""Writes MXFP4 weights in the order of grouped_mxfp4_layout as bf16, exactly, which pays for many rows of a product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.gemm.triton.int4_tile import e2m1_value, e8m0_value
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.grouped_mxfp4_layout import CODE_WORDS, FEATURES, GROUP, INPUTS, SCALE_OFFSET, WORDS
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents


@triton.jit
def _dequantise_grouped_mxfp4_kernel(
    words_ptr,
    scales_ptr,
    out_ptr,
    IN_FEATURES: tl.constexpr,
    UNITS: tl.constexpr,
    WORDS: tl.constexpr,
    CODE_WORDS: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A unit.  scales_ptr: the same memory as words_ptr, by bytes."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    unit = tl.program_id(0).to(tl.int64)
    rows, eighths, codes = tl.arange(0, FEATURES), tl.arange(0, INPUTS // 8), tl.arange(0, 8)
    r16, r8, row, part, of_part = rows // 16, rows // 8 % 2, rows % 8, eighths // 2, eighths % 2
    of_row, of_part_words = (r16 * 8 + row) * 16 + 2 * r8, part * 4 + of_part
    words = tl.load(words_ptr + unit * WORDS + of_row[:, None] + of_part_words[None, :])
    # Places in a word: grouped_mxfp4_layout.PLACES.
    pair, half = codes // 2, codes % 2 * 16
    is_last = pair == 3
    sign = tl.where(is_last, 11, 15 - 3 * pair) + half
    high = tl.where(is_last, 10, 8 - 3 * pair) + half
    low = tl.where(is_last, 14, 7 - 3 * pair) + half
    fraction = tl.where(is_last, 13, 6 - 3 * pair) + half
    spread = words[:, :, None]
    found = ((spread >> sign[None, None, :]) & 1) << 3 | ((spread >> high[None, None, :]) & 1) << 2
    found |= ((spread >> low[None, None, :]) & 1) << 1 | ((spread >> fraction[None, None, :]) & 1)
    groups = eighths * 8 // GROUP
    of_scales = (row[:, None] * (INPUTS // GROUP) + groups[None, :]) * 4 + (r16 * 2 + r8)[:, None]
    exponents = tl.load(scales_ptr + 4 * (unit * WORDS + CODE_WORDS) + of_scales).to(tl.int32) - SCALE_OFFSET
    values = e2m1_value(found) * e8m0_value(exponents)[:, :, None]
    features = (unit % UNITS) * INPUTS + eighths[:, None] * 8 + codes[None, :]
    out_rows = out_ptr + (unit // UNITS * FEATURES + rows) * IN_FEATURES
    places = out_rows[:, None, None] + features[None, :, :]
    tl.store(places, values.to(out_ptr.dtype.element_ty), mask=features[None, :, :] < IN_FEATURES)


def dequantise_grouped_mxfp4(weight: Int4Weight) -> torch.Tensor:
    """[out_features of all experts, in_features] bf16 of repacked MXFP4 weights."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=torch.bfloat16, device=weight.packed.device)
    tiles, units, _ = weight.packed.shape
    _dequantise_grouped_mxfp4_kernel[(tiles * units,)](
        weight.packed,
        weight.packed.view(torch.uint8),
        out,
        IN_FEATURES=weight.in_features,
        UNITS=units,
        WORDS=WORDS,
        CODE_WORDS=CODE_WORDS,
        SCALE_OFFSET=SCALE_OFFSET,
        FEATURES=FEATURES,
        INPUTS=INPUTS,
        GROUP=GROUP,
        **dependent_launch(out.device),
    )
    return out
