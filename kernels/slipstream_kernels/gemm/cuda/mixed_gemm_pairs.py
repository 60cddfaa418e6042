"""Products of few bf16 rows with 4-bit weights in CUDA, as FP8 products of two rows each: choice, arguments, launch.

A bf16 number is a sum of two e4m3 numbers (csrc/pipeline/split_rows.cuh), and operands of FP8 products take a quarter
of the instructions that 16-bit ones take.  Hopper only.  No device value is read on the host, and no workspace outlives
a call: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from slipstream_kernels.gemm.cuda import mixed_gemm
from slipstream_kernels.gemm.cuda.mixed_gemm import BLOCK, WARPGROUPS_M, Format, Variant, fits
from slipstream_kernels.gemm.cuda.mixed_gemm_w4a16 import GROUPS, Scratch, launch_both
from slipstream_kernels.gemm.tuning import H200, Tuning
from slipstream_kernels.integer import Int4Weight

SOURCE = mixed_gemm.SOURCE
COLUMNS = (8, 16, 32, 48, 64)  # of products, two for each token, that are compiled; others are rounded up
MAX_TOKENS = COLUMNS[-1] // 2


def format_of(dtype: torch.dtype, groups: int) -> Format:
    """The format of bf16 rows and of weights with so many groups in 128 input features."""
    assert dtype == torch.bfloat16
    return Format("W4A16Pairs", "__nv_fp8_e4m3", groups)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [format_of(torch.bfloat16, groups).defines(columns) for groups in GROUPS for columns in COLUMNS]


def mixed_gemm_pairs(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor, variant: Variant
) -> None:
    """out = x @ dequantised(weight).T + bias, of at most variant.columns / 2 rows.

    Two launches: the first splits x.  x: [num_tokens, in_features] bf16, rows at multiples of 16 bytes.  weight:
    repacked for 16-bit rows.  out: [num_tokens, out_features], contiguous, bf16; bias too.
    """
    if not x.shape[0]:
        return
    weight_format = format_of(x.dtype, weight.scales.shape[3])
    num_groups = weight_format.groups * (weight.in_features // BLOCK)
    scratch = Scratch(
        torch.empty(variant.columns, weight.in_features, dtype=torch.uint8, device=x.device),
        torch.empty(num_groups, variant.columns, device=x.device),
    )
    launch_both(x, weight, bias, out, (weight_format, variant), scratch)


def choose(
    num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int], tuning: Tuning = H200
) -> Variant | None:
    """The first of the ordered variants whose CTAs have all their output features at once; else several passes.

    sizes: output and input features.  count_clusters: how many of a variant's clusters run at once; 0: it cannot run.
    None: so many rows are not multiplied here.
    """
    if num_tokens > MAX_TOKENS:
        return None
    columns, blocks = columns_of(num_tokens), sizes[1] // BLOCK
    ordered = next(choices for most, choices in tuning.mixed_gemm_pairs.items() if columns <= most)
    for warpgroups_m, splits, least, most in ordered:
        variant = Variant(columns, warpgroups_m, splits)
        if least <= blocks <= most and fits(sizes, variant, count_clusters(variant)):
            return variant
    return Variant(columns, WARPGROUPS_M[-1], 1)


def candidates(num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int]) -> Iterator[Variant]:
    """The variants that can run; arguments as of choose."""
    return mixed_gemm.candidates_of((columns_of(num_tokens), 1), sizes, count_clusters)


def columns_of(num_tokens: int) -> int:
    """Columns of a tile that holds so many tokens."""
    return next(count for count in COLUMNS if count >= 2 * num_tokens)
