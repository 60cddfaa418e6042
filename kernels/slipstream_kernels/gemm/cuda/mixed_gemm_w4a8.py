"""Products of few FP8 rows with prepacked 4-bit weights in CUDA: arguments, launch.  Hopper only.

No device value is read on the host and there is no workspace: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.launch import launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.cuda.mixed_gemm import SOURCE, Format, MixedGemmParams, clusters_along_m, clusters_at_once
from slipstream_kernels.gemm.cuda.mixed_gemm_w4a8_choice import (
    BLOCK,
    COLUMNS,
    GROUP_TILES,
    MAX_TOKENS,
    MAX_WARPGROUPS_M,
    MAX_WIDE_WARPGROUPS_M,
    SPLITS,
    TILE,
    WARPGROUPS_M,
    Variant,
    choose,
    tiles_of,
)
from slipstream_kernels.integer import Int4Weight

GROUPS = (1, 2)  # of 128 input features


def format_of(dtype: torch.dtype, groups: int) -> Format:
    """The format of weights with so many groups in 128 input features.  One library gives results of both types."""
    return Format("W4A8", "__nv_fp8_e4m3", groups)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [format_of(torch.bfloat16, groups).defines(columns) for columns in COLUMNS for groups in GROUPS]


def mixed_gemm_w4a8(
    rows: Fp8Rows,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    activation_sums: torch.Tensor,
    variant: Variant | None = None,
) -> None:
    """out = dequantised(rows) @ dequantised(weight).T + bias, of rows that it serves.  One launch.

    rows: scaled per token, at multiples of 16 bytes.  activation_sums: as Fp8Rows has them.  weight: repacked for FP8
    rows.  out: [num_tokens, out_features], contiguous, bf16 or fp16; bias too.  variant: None: chosen by the sizes.
    """
    assert weight.zeros is not None
    if not rows.num_tokens:
        return
    device, weight_format = out.device, format_of(out.dtype, weight.scales.shape[2])
    sizes, at_once = (weight.out_features, weight.in_features), partial(clusters_at_once, device, weight_format)
    variant = variant or choose(rows.num_tokens, sizes, at_once)
    assert variant is not None
    params = MixedGemmParams(
        x=rows.values.data_ptr(),
        token_scale=rows.scales.data_ptr(),
        activation_sums=activation_sums.data_ptr(),
        qweight=weight.packed.data_ptr(),
        group_scales=weight.scales.data_ptr(),
        channel_scale=weight.zeros.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_row_stride=rows.values.stride(0),
        num_tokens=rows.num_tokens,
        out_features=weight.out_features,
        in_features=weight.in_features,
        warpgroups_m=variant.warpgroups_m,
        splits=variant.splits,
        num_clusters=clusters_along_m(weight.out_features, variant, at_once(variant)) * variant.token_tiles,
        token_tiles=variant.token_tiles,
        is_channelwise=weight.scales.shape[0] == 1,
        out_is_half=out.dtype == torch.float16,
        is_dependent=launches_dependently(device),
        copy_pace=copy_pace(device),
    )
    launch("mixed_gemm", load(SOURCE, weight_format.defines(variant.columns)), params, device)


def serves(num_tokens: int, weight: Int4Weight) -> bool:
    """Whether so many rows are multiplied here: up to MAX_TOKENS, and more where that is faster than other kernels."""
    weight_format = format_of(torch.bfloat16, weight.scales.shape[2])
    at_once = partial(clusters_at_once, weight.packed.device, weight_format)
    return choose(num_tokens, (weight.out_features, weight.in_features), at_once) is not None


def candidates(num_tokens: int, weight: Int4Weight, device: torch.device) -> Iterator[Variant]:
    """The variants that can run."""
    tiles, (columns, token_tiles) = weight.out_features // TILE, tiles_of(num_tokens)
    weight_format = format_of(torch.bfloat16, weight.scales.shape[2])
    limit = MAX_WARPGROUPS_M if columns <= MAX_TOKENS else MAX_WIDE_WARPGROUPS_M
    for warpgroups_m in (count for count in WARPGROUPS_M if count <= limit):
        for splits in SPLITS:
            variant = Variant(columns, warpgroups_m, splits, token_tiles)
            clusters = clusters_along_m(weight.out_features, variant, clusters_at_once(device, weight_format, variant))
            if not clusters or splits > weight.in_features // BLOCK:
                continue
            tiles_of_cluster = -(-tiles // clusters)
            if tiles_of_cluster <= GROUP_TILES * warpgroups_m or (warpgroups_m == MAX_WARPGROUPS_M and splits == 1):
                yield variant
