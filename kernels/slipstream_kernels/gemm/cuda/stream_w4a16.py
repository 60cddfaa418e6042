"""Products of many 16-bit rows with 4-bit weights in CUDA, expanded beside the tensor cores: arguments and launch.

Hopper only.  No device value is read on the host: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.gemm.cuda.stream_libraries import count_ctas_of, load_all
from slipstream_kernels.gemm.cuda.stream_plan import UNIT_ROWS, Plan, split_workspace
from slipstream_kernels.gemm.cuda.stream_w4a16_choice import COLUMNS
from slipstream_kernels.integer import Int4Weight

SOURCE = "sm90_stream_w4a16.cu"
OPERANDS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
GROUPS = (1, 2)  # of 128 input features

POINTERS = ("x", "qweight", "group_scales", "scale", "bias", "out", "partial_sums", "counters")
STRIDES = ("x_row_stride", "out_row_stride")
COUNTS = (
    "num_tokens", "num_units", "in_features", "num_tiles", "token_tiles", "num_ctas", "is_channelwise", "is_dependent",
)  # fmt: skip


class StreamW4A16Params(ctypes.Structure):
    """csrc/params/stream_w4a16_params.h, field by field."""

    _fields_ = fields(POINTERS, STRIDES, COUNTS)


def defines(dtype: torch.dtype, groups: int, columns: int) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (
        f"SLIPSTREAM_OPERAND={OPERANDS[dtype]}",
        f"SLIPSTREAM_GROUPS={groups}",
        f"SLIPSTREAM_COLUMNS={columns}",
    )


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(dtype, groups, columns) for dtype in OPERANDS for groups in GROUPS for columns in COLUMNS]


def build_refusal(dtype: torch.dtype, groups: int) -> str | None:
    """Why rows of `dtype` cannot take weights with so many groups in 128 input features; None if they can."""
    return missing(SOURCE, defines(dtype, groups, COLUMNS[0]))


@lru_cache
def build_all(dtype: torch.dtype, groups: int) -> None:
    """All libraries of these, side by side."""
    load_all(SOURCE, [defines(dtype, groups, columns) for columns in COLUMNS])


def count_ctas(device: torch.device, dtype: torch.dtype, groups: int, columns: int) -> int:
    """How many CTAs with tiles of so many tokens run at once on the device."""
    return count_ctas_of(device, SOURCE, defines(dtype, groups, columns))


def stream_w4a16(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    plan: Plan,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ dequantised(weight).T + bias.  One launch.

    x: [num_tokens, in_features] bf16 or fp16, rows at multiples of 16 bytes; bias has its type.  weight: repacked for
    16-bit rows.  plan: of stream_w4a16_choice.  counters: as split_workspace takes them.
    """
    assert weight.zeros is not None
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    partial_sums, counters = split_workspace(plan, counters, x.device)
    group_scales, _ = weight.scales
    tensors = {
        "x": x,
        "qweight": weight.packed,
        "group_scales": group_scales,
        "scale": weight.zeros,
        "bias": bias,
        "out": out,
        "partial_sums": partial_sums,
        "counters": counters,
    }
    params = StreamW4A16Params(
        **addresses(tensors),
        x_row_stride=x.stride(0) * x.element_size(),
        out_row_stride=out.stride(0),
        num_tokens=x.shape[0],
        num_units=weight.out_features // UNIT_ROWS,
        in_features=weight.in_features,
        num_tiles=plan.num_tiles,
        token_tiles=plan.token_tiles,
        num_ctas=plan.num_ctas,
        is_channelwise=group_scales.shape[0] == 1,
        is_dependent=launches_dependently(x.device),
    )
    library = load(SOURCE, defines(x.dtype, group_scales.shape[2], plan.columns))
    launch("stream_w4a16", library, params, x.device)
    return out
