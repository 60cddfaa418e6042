"""Products of 17 and more 16-bit rows with 4-bit weights in CUDA: choice of a variant, arguments, launch.  Hopper only.

Tiles of few tokens scale sums (W4A16Sums), others operands (W4A16).  No device value is read on the host, and no
workspace outlives a call: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.launch import addresses, launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.gemm.cuda import mixed_gemm
from slipstream_kernels.gemm.cuda.mixed_gemm import (
    BLOCK,
    OPERANDS,
    SOURCE,
    Format,
    MixedGemmParams,
    Variant,
    clusters_along_m,
    clusters_at_once,
    fits,
    tiles_of,
)
from slipstream_kernels.gemm.tuning import H200, Tuning
from slipstream_kernels.integer import Int4Weight

COLUMNS = mixed_gemm.COLUMNS[1:]  # skinny_gemm_w4a16 multiplies fewer
GROUPS = (1, 2)  # of 128 input features
# Scaling sums takes instructions for every token of a tile, scaling operands the same number for any tile.
SUMS_COLUMNS = 32


def format_of(dtype: torch.dtype, groups: int) -> Format:
    """The format of rows of `dtype` and of weights with so many groups in 128 input features."""
    return Format("W4A16", OPERANDS[dtype], groups, SUMS_COLUMNS)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [format_of(dtype, groups).defines(columns) for dtype in OPERANDS for groups in GROUPS for columns in COLUMNS]


def mixed_gemm_w4a16(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor, variant: Variant
) -> None:
    """out = x @ dequantised(weight).T + bias, of at most variant.columns * variant.token_tiles rows.

    Two launches: the first permutes the features of x, and adds up groups of them where sums are scaled.
    x: [num_tokens, in_features] bf16 or fp16, rows at multiples of 16 bytes.  weight: repacked for 16-bit rows.
    out: [num_tokens, out_features], contiguous, x's dtype; bias too.
    """
    weight_format = format_of(x.dtype, weight.scales.shape[3])
    activation_sums = None  # of tiles that scale operands
    if variant.columns <= SUMS_COLUMNS:
        num_groups = weight_format.groups * (weight.in_features // BLOCK)
        activation_sums = torch.empty(variant.token_tiles, num_groups, variant.columns, device=x.device)
    scratch = Scratch(torch.empty(x.shape, dtype=x.dtype, device=x.device), activation_sums)
    launch_both(x, weight, bias, out, (weight_format, variant), scratch)


class Scratch(NamedTuple):
    """What the first launch of a product leaves to the second: rows of x as operands, and sums of their groups."""

    permuted_x: torch.Tensor
    activation_sums: torch.Tensor | None


def launch_both(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    variant: tuple[Format, Variant],
    scratch: Scratch,
) -> None:
    """The two launches of a product with weights repacked for 16-bit rows; arguments as of mixed_gemm_w4a16."""
    assert weight.zeros is not None
    group_scales, _ = weight.scales
    weight_format, sizes = variant
    clusters = clusters_along_m(weight.out_features, sizes, clusters_at_once(x.device, weight_format, sizes))
    tensors = {
        "x": x,
        "qweight": weight.packed,
        "group_scales": group_scales,
        "channel_scale": weight.zeros,
        "activation_sums": scratch.activation_sums,
        "bias": bias,
        "permuted_x": scratch.permuted_x,
        "out": out,
    }
    params = MixedGemmParams(
        **addresses(tensors),
        x_row_stride=x.stride(0) * x.element_size(),
        num_tokens=x.shape[0],
        out_features=weight.out_features,
        in_features=weight.in_features,
        warpgroups_m=sizes.warpgroups_m,
        splits=sizes.splits,
        num_clusters=clusters * sizes.token_tiles,
        token_tiles=sizes.token_tiles,
        is_channelwise=group_scales.shape[0] == 1,
        is_dependent=launches_dependently(x.device),
        copy_pace=copy_pace(x.device),
    )
    launch("mixed_gemm", load(SOURCE, weight_format.defines(sizes.columns)), params, x.device)


def choose(
    num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int], tuning: Tuning = H200
) -> Variant | None:
    """The first of the ordered variants whose CTAs have all their output features at once; else several passes.

    sizes: output and input features.  count_clusters: how many of a variant's clusters run at once; 0: it cannot run.
    None: so many rows of so small a weight, which other kernels multiply faster.
    """
    small = next(numbers for most, numbers in tuning.small_weights.items() if num_tokens <= most)
    if sizes[0] * sizes[1] <= small:
        return None
    blocks = sizes[1] // BLOCK
    ordered = next(choices for most, choices in tuning.mixed_gemm_w4a16.items() if num_tokens <= most)
    for most_columns, warpgroups_m, splits, least, most in ordered:
        columns, token_tiles = tiles_of(num_tokens, most_columns)
        variant = Variant(columns, warpgroups_m, splits, token_tiles)
        if least <= blocks <= most and fits(sizes, variant, count_clusters(variant)):
            return variant
    columns, token_tiles = tiles_of(num_tokens)
    return Variant(columns, mixed_gemm.WARPGROUPS_M[-1], 1, token_tiles)


def candidates(num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int]) -> Iterator[Variant]:
    """The variants that can run; arguments as of choose."""
    for tiles in sorted({tiles_of(num_tokens, most_columns) for most_columns in COLUMNS}):
        yield from mixed_gemm.candidates_of(tiles, sizes, count_clusters)
