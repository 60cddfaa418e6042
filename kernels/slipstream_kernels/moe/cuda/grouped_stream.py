"""Grouped products of few rows an expert with bf16 and FP8 weights, in CUDA: arguments and launch.  Hopper only.

Contract: ops.grouped_mm of bf16 or e4m3 rows and weights; results in bf16.  No device value is read on the host:
CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import copy_pace, launches_dependently
from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm.linear_weight import LinearWeight, expert_counters
from slipstream_kernels.moe.product import Product
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_stream.cu"
COLUMNS = (32, 64)  # rows of a tile
MAX_EXPERTS = 512
CHUNK_BYTES = 128  # of a row, which a stage of the ring holds

POINTERS = ("x", "x_scale", "tokens", "offsets", "weight", "scale", "out", "counters")
COUNTS = (
    "num_experts", "out_features", "in_features", "is_gated", "num_ctas", "is_dependent", "scale_rows",
    "scale_columns", "guess", "copy_pace",
)  # fmt: skip
GUESS_NOTHING, GUESS_ALL_EXPERTS, GUESS_BY_OFFSETS = 0, 1, 2  # GroupedGuess of the parameters' header
SCALES = ("kNone", "kOfRows", "kOfBlocks")  # csrc/schedule/grouped_stream_shape.cuh


class GroupedStreamParams(ctypes.Structure):
    """csrc/params/grouped_stream_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride", "x_scale_stride"), COUNTS)


class Variant(NamedTuple):
    """columns: rows of a tile.

    guesses_all: before the routing is known, weights are copied as if all experts had rows.  Rows that are the
    routing's come of a product over it, which then is known early.
    """

    columns: int
    guesses_all: bool


@lru_cache
def product_refusal(product: Product) -> str | None:
    """Why this kernel cannot make the product; None if it can."""
    weight = product.weight
    if (reason := hopper_refusal(weight.device, "weight is")) is not None:
        return reason
    if weight.dtype not in (torch.bfloat16, E4M3) or product.dtype != torch.bfloat16:
        return f"weights are {weight.dtype} and results {product.dtype}, not bfloat16"
    if weight.num_experts > MAX_EXPERTS:
        return f"{weight.num_experts} experts are more than {MAX_EXPERTS}"
    features, inputs = (16 if product.gated else 8), CHUNK_BYTES // weight.dtype.itemsize
    if weight.out_features % features or weight.in_features % inputs:
        sizes = f"out_features {weight.out_features} or in_features {weight.in_features}"
        return f"{sizes} is not a multiple of {features} or {inputs}"
    return missing(SOURCE, defines(COLUMNS[0], SCALES[0]))


def choose(product: Product, tuning: Tuning = H200) -> Variant:
    """The smallest tile that holds the rows of most experts, or twice as many where scales are of blocks."""
    weight, num_rows, num_experts = product.weight, product.num_rows, product.weight.num_experts
    factor = tuning.stream_block_factor if weight.format == "fp8_block" else tuning.stream_capacity_factor
    likely = min(product.num_tokens, factor * num_rows / num_experts)
    columns = next((columns for columns in COLUMNS if columns >= likely), COLUMNS[-1])
    return Variant(columns, num_rows >= tuning.least_guessed_rows * num_experts)


def grouped_mm(
    x: torch.Tensor | Fp8Rows, weight: LinearWeight, routing: Routing, by_token: bool, gated: bool, variant: Variant
) -> torch.Tensor:
    """See ops.grouped_mm.  One launch."""
    num_experts, out_features, in_features = weight.tensor.shape
    rows, x_scale = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    if rows.stride(0) * rows.element_size() % 16 or rows.data_ptr() % 16:
        rows = rows.contiguous()
    device = weight.tensor.device
    out = torch.empty(
        (routing.num_rows, out_features // 2 if gated else out_features), dtype=torch.bfloat16, device=device
    )
    if not routing.num_rows:
        return out
    by_blocks = weight.scales is not None and weight.scales.dim() == 3
    counters = expert_counters(device) if weight.counters is None else weight.counters
    operands = {"x": rows, "x_scale": x_scale, "weight": weight.tensor, "scale": weight.scales, "out": out}
    order = {"tokens": routing.tokens if by_token else None, "offsets": routing.offsets, "counters": counters}
    params = GroupedStreamParams(
        **addresses({**operands, **order}),
        x_row_stride=rows.stride(0),
        x_scale_stride=x_scale.stride(-1) if x_scale is not None and by_blocks else 0,
        num_experts=num_experts,
        out_features=out_features,
        in_features=in_features,
        is_gated=gated,
        num_ctas=count_sms(device),
        is_dependent=launches_dependently(device),
        scale_rows=weight.scales.shape[1] if weight.scales is not None and by_blocks else 0,
        scale_columns=weight.scales.shape[2] if weight.scales is not None and by_blocks else 0,
        guess=_guess(by_token, variant),
        copy_pace=copy_pace(device),
    )
    scales = SCALES[0 if weight.scales is None else weight.scales.dim() - 1]
    launch("grouped_stream", load(SOURCE, defines(variant.columns, scales)), params, device)
    return out


def _guess(by_token: bool, variant: Variant) -> int:
    if not by_token:
        return GUESS_BY_OFFSETS
    return GUESS_ALL_EXPERTS if variant.guesses_all else GUESS_NOTHING


def defines(columns: int, scales: str) -> tuple[str, ...]:
    """The macros that choose a library."""
    return f"SLIPSTREAM_COLUMNS={columns}", f"SLIPSTREAM_SCALES={scales}"


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(columns, scales) for scales in SCALES for columns in COLUMNS]
