"""The product of 65 to 256 FP8 rows in evenly shared chunks, in CUDA: arguments and launch.  Hopper only.

Contract: ops.swap_ab_gemm of e4m3 with one scale a weight row, results in bf16.  No device value is read on the host:
CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.cuda.stream_libraries import count_ctas_of, load_all
from slipstream_kernels.gemm.cuda.stream_plan import UNIT_ROWS, Plan, split_workspace
from slipstream_kernels.gemm.cuda.swap_ab_stream_choice import COLUMNS

SOURCE = "sm90_swap_ab_stream.cu"
ALIGNMENT = 16  # bytes: of rows, and input features of a weight

POINTERS = ("x", "weight", "x_scale", "scale", "bias", "out", "partial_sums", "counters")
STRIDES = ("x_row_stride", "out_row_stride")
COUNTS = (
    "num_tokens", "num_units", "in_features", "is_dependent", "num_tiles", "num_ctas", "copy_pace",
)  # fmt: skip


class SwapAbStreamParams(ctypes.Structure):
    """csrc/params/swap_ab_stream_params.h, field by field."""

    _fields_ = fields(POINTERS, STRIDES, COUNTS)


@lru_cache
def product_refusal(device: torch.device, output: torch.dtype, out_features: int, in_features: int) -> str | None:
    """Why this kernel cannot multiply e4m3 rows by a weight of this shape to results of `output`; None if it can."""
    if (reason := hopper_refusal(device, "weight is")) is not None:
        return reason
    if output != torch.bfloat16:
        return f"results are {output}, not bfloat16"
    if out_features % UNIT_ROWS or in_features % ALIGNMENT:
        return f"out_features {out_features} or in_features {in_features} is not a multiple of {UNIT_ROWS}"
    return missing(SOURCE, defines(COLUMNS[0]))


@lru_cache
def build_all() -> None:
    """All libraries, side by side."""
    load_all(SOURCE, [defines(columns) for columns in COLUMNS])


def count_ctas(device: torch.device, columns: int) -> int:
    """How many CTAs with tiles of so many tokens run at once on the device."""
    return count_ctas_of(device, SOURCE, defines(columns))


def swap_ab_stream(
    x: Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.swap_ab_gemm, not gated.  One launch.

    plan: of swap_ab_stream_choice.  counters: as split_workspace takes them.
    """
    out = torch.empty((x.num_tokens, weight.shape[0]), dtype=x.dtype, device=weight.device)
    if not x.num_tokens:
        return out
    partial_sums, counters = split_workspace(plan, counters, weight.device)
    operands = {"x": x.values, "weight": weight, "x_scale": x.scales, "scale": scales, "bias": bias, "out": out}
    params = SwapAbStreamParams(
        **addresses({**operands, "partial_sums": partial_sums, "counters": counters}),
        x_row_stride=x.values.stride(0),
        out_row_stride=out.stride(0),
        num_tokens=x.num_tokens,
        num_units=weight.shape[0] // UNIT_ROWS,
        in_features=weight.shape[1],
        is_dependent=launches_dependently(weight.device),
        num_tiles=plan.num_tiles,
        num_ctas=plan.num_ctas,
        copy_pace=copy_pace(weight.device),
    )
    launch("swap_ab_stream", load(SOURCE, defines(plan.columns)), params, weight.device)
    return out


def defines(columns: int) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (f"SLIPSTREAM_COLUMNS={columns}",)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(columns) for columns in COLUMNS]
