"""Products of 65 to 512 FP8 rows with 4-bit weights in CUDA, shared out evenly: arguments and launch.

Hopper only.  No device value is read on the host: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.cuda.stream_libraries import count_ctas_of, load_all
from slipstream_kernels.gemm.cuda.stream_plan import UNIT_ROWS, split_workspace
from slipstream_kernels.gemm.cuda.stream_w4a8_choice import TILES, WARPGROUP_ROWS, Plan, Tile
from slipstream_kernels.integer import Int4Weight

SOURCE = "sm90_stream_w4a8.cu"
OUTPUTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
GROUPS = (1, 2)  # of 128 input features

POINTERS = (
    "x", "qweight", "group_scales", "x_scale", "activation_sums", "scale", "bias", "out", "partial_sums", "counters",
)  # fmt: skip
STRIDES = ("x_row_stride", "out_row_stride")
COUNTS = (
    "num_tokens", "num_units", "in_features", "num_tiles", "token_tiles", "num_ctas", "is_channelwise", "is_dependent",
    "copy_pace",
)  # fmt: skip


class StreamW4A8Params(ctypes.Structure):
    """csrc/params/stream_w4a8_params.h, field by field."""

    _fields_ = fields(POINTERS, STRIDES, COUNTS)


def defines(dtype: torch.dtype, groups: int, tile: Tile) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (
        f"SLIPSTREAM_OUT={OUTPUTS[dtype]}",
        f"SLIPSTREAM_GROUPS={groups}",
        f"SLIPSTREAM_WARPGROUPS={tile.rows // WARPGROUP_ROWS}",
        f"SLIPSTREAM_COLUMNS={tile.columns}",
        f"SLIPSTREAM_IS_EXACT={tile.is_exact}",
    )


def variants() -> list[tuple[str, ...]]:
    """The libraries of bf16 models, for building ahead of time."""
    return [defines(torch.bfloat16, groups, tile) for groups in GROUPS for tile in TILES]


def build_refusal(dtype: torch.dtype, groups: int) -> str | None:
    """Why results of `dtype` cannot be had of weights with so many groups in 128 features; None if they can."""
    return missing(SOURCE, defines(dtype, groups, TILES[0]))


@lru_cache
def build_all(dtype: torch.dtype, groups: int) -> None:
    """All libraries of these, side by side."""
    load_all(SOURCE, [defines(dtype, groups, tile) for tile in TILES])


def count_ctas(device: torch.device, dtype: torch.dtype, groups: int, tile: Tile) -> int:
    """How many CTAs with such tiles run at once on the device."""
    return count_ctas_of(device, SOURCE, defines(dtype, groups, tile))


def stream_w4a8(
    rows: Fp8Rows,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    plan: Plan,
    counters: torch.Tensor | None = None,
    *,
    activation_sums: torch.Tensor | None = None,
) -> None:
    """out = dequantised(rows) @ dequantised(weight).T + bias.  One launch.

    rows: scaled per token, at multiples of 16 bytes.  weight: repacked for FP8 rows; without a tile that is exact its
    numbers are rounded to e4m3, as w4a8_gemm has them.  out: [num_tokens, out_features], bf16 or fp16; bias too.
    plan: of stream_w4a8_choice.  counters: as split_workspace takes them.  activation_sums: as Fp8Rows has them, of
    exact tiles.
    """
    assert weight.zeros is not None
    assert activation_sums is not None or not plan.is_exact
    partial_sums, counters = split_workspace(plan, counters, out.device)
    tensors = {
        "x": rows.values,
        "qweight": weight.packed,
        "group_scales": weight.scales,
        "x_scale": rows.scales,
        "activation_sums": activation_sums,
        "scale": weight.zeros,
        "bias": bias,
        "out": out,
        "partial_sums": partial_sums,
        "counters": counters,
    }
    params = StreamW4A8Params(
        **addresses(tensors),
        x_row_stride=rows.values.stride(0),
        out_row_stride=out.stride(0),
        num_tokens=rows.num_tokens,
        num_units=weight.out_features // UNIT_ROWS,
        in_features=weight.in_features,
        num_tiles=plan.num_tiles,
        token_tiles=plan.token_tiles,
        num_ctas=plan.num_ctas,
        is_channelwise=weight.scales.shape[0] == 1,
        is_dependent=launches_dependently(out.device),
        copy_pace=copy_pace(out.device),
    )
    launch("stream_w4a8", load(SOURCE, defines(out.dtype, weight.scales.shape[2], plan.tile)), params, out.device)
