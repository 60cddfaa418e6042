"""Products of FP8 rows with 4-bit weights in CUDA, by each of their kernels.  Hopper only.

Up to 64 rows, reading the weights takes the time: mixed_gemm_w4a8; up to 256 of small outputs.  Most of 65 to 256 rows:
stream_w4a8.  Beyond, CUTLASS (w4a8_gemm); without its headers, mixed_gemm_w4a8 with 64 rows at a time.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import build_refusal
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.fp8 import SUM_TILE_ROWS, Fp8Rows, activation_sums
from slipstream_kernels.gemm import int4_layout, w4a8_layout
from slipstream_kernels.gemm.cuda import mixed_gemm_w4a8, stream_w4a8, w4a8_gemm
from slipstream_kernels.gemm.cuda.cutlass_gemm import Tile
from slipstream_kernels.gemm.cuda.mixed_gemm_w4a8_choice import COLUMNS, MAX_TOKENS, Variant
from slipstream_kernels.gemm.cuda.stream_w4a8_choice import SUM_TOKENS, Plan
from slipstream_kernels.integer import Int4Weight

LOG = logging.getLogger(__name__)
assert COLUMNS[-1] == SUM_TOKENS == SUM_TILE_ROWS  # kSumTokens of mixed_gemm_shape.cuh


def refusal(weight: Int4Weight) -> str | None:
    """Why this version cannot serve a canonical weight; None if it can."""
    if (reason := hopper_refusal(weight.packed.device, "the weight is")) is not None:
        return reason
    sizes = int4_layout.refusal(weight.out_features, weight.in_features, weight.group_size)
    return sizes or build_refusal(
        mixed_gemm_w4a8.SOURCE, mixed_gemm_w4a8.format_of(torch.bfloat16, 1).defines(COLUMNS[0])
    )


def few(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None, config: tuple[int, ...]) -> torch.Tensor:
    """See ops.int4_mm, of rows that mixed_gemm_w4a8 serves.  config: of its Variant.  One launch."""
    rows, out = _prepared(rows, weight)
    mixed_gemm_w4a8.mixed_gemm_w4a8(
        rows, weight, bias, out, activation_sums=_activation_sums(rows, weight), variant=Variant(*config)
    )
    return out


def shared_out(
    rows: Fp8Rows,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    config: tuple[int, ...],
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.int4_mm.  By stream_w4a8, in one launch; config: of its Plan."""
    rows, out = _prepared(rows, weight)
    plan = Plan(*config)
    sums = _activation_sums(rows, weight) if plan.is_exact else None
    stream_w4a8.stream_w4a8(rows, weight, bias, out, plan, counters, activation_sums=sums)
    return out


def many(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None, config: tuple[int, ...]) -> torch.Tensor:
    """See ops.int4_mm.  By CUTLASS, in one launch; config: tokens, rows and cluster of its tile."""
    rows, out = _prepared(rows, weight)
    w4a8_gemm.w4a8_gemm(rows, weight, bias, out, Tile(*config))
    return out


def in_parts(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None, config: tuple[int, ...]) -> torch.Tensor:
    """See ops.int4_mm.  A launch for every MAX_TOKENS rows; config says nothing."""
    rows, out = _prepared(rows, weight)
    for start in range(0, rows.num_tokens, MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        num_tokens = len(out[part])
        some = replace(
            rows,
            values=rows.values[part],
            scales=rows.scales[part],
            num_tokens=num_tokens,
            activation_sums=None,
            padded=None,
        )
        mixed_gemm_w4a8.mixed_gemm_w4a8(some, weight, bias, out[part], activation_sums=_activation_sums(some, weight))
    return out


def _prepared(rows: Fp8Rows, weight: Int4Weight) -> tuple[Fp8Rows, torch.Tensor]:
    """(rows that begin at multiples of 16 bytes, the empty result)"""
    values = rows.values
    if values.stride(0) % 16 or values.data_ptr() % 16:
        rows = replace(rows, values=values.contiguous())
    return rows, torch.empty((rows.num_tokens, weight.out_features), dtype=rows.dtype, device=values.device)


def _activation_sums(rows: Fp8Rows, weight: Int4Weight) -> torch.Tensor:
    """The activation sums of the rows, computed here if the rows come without."""
    if rows.activation_sums is not None:
        return rows.activation_sums
    sum_columns = w4a8_layout.sum_columns(weight.group_size)
    return activation_sums(rows.values[: rows.num_tokens], sum_columns)


@lru_cache
def many_rows_refusal(dtype: torch.dtype) -> str | None:
    """Why `many` cannot give results of `dtype` here; None if it can."""
    reason = w4a8_gemm.refusal(dtype)
    if reason is not None:
        LOG.warning("more than %d FP8 rows are multiplied %d at a time: %s", MAX_TOKENS, MAX_TOKENS, reason)
    return reason
