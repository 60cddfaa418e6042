"""The grouped GEMM of 16-bit operands: its libraries, the choice of a variant.  Hopper only; grouped_gemm launches it.

FP8 rows are multiplied as fp16, exactly.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch

from slipstream_kernels.cuda.build import build_refusal
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda.skinny_gemm_w4a16 import INPUTS
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda import grouped_gemm
from slipstream_kernels.moe.cuda.grouped_gemm import BLOCK, TILE, Kernel, Rows, Variant, likely_rows
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_w4a16_gemm.cu"
COLUMNS = (2, 6)  # of 8 rows, of the tiles of tokens that are compiled


def defines(dtype: torch.dtype, columns: int, groups_per_block: int, gated: bool) -> tuple[str, ...]:
    """The macros that choose the library for rows of `dtype`; groups: 1 (of 128, or whole rows) or 2 (of 64)."""
    return (
        f"SLIPSTREAM_COLUMNS={columns}",
        f"SLIPSTREAM_INPUT={INPUTS[dtype]}",
        f"SLIPSTREAM_GROUPS={groups_per_block}",
        f"SLIPSTREAM_GATED={int(gated)}",
    )


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(*variant) for variant in itertools.product(INPUTS, COLUMNS, (1, 2), (False, True))]


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why this format cannot hold a canonical weight of so many experts; None if it can."""
    if (reason := grouped_gemm.refusal(weight, num_experts)) is not None:
        return reason
    out_features = weight.out_features // num_experts
    if out_features % (2 * TILE):
        return f"out_features: {out_features} of an expert are not a multiple of {2 * TILE}"
    sizes = int4_layout.refusal(out_features, weight.in_features, weight.group_size)
    groups = int4_layout.groups_per_block(weight.group_size)
    return sizes or build_refusal(SOURCE, defines(torch.bfloat16, COLUMNS[0], groups, True))


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning = H200) -> tuple[int]:
    """(columns,) of a tile that holds all rows of most experts.

    sizes: numbers of tokens, of rows and of experts.  out_features, num_sms: do not matter here.
    """
    likely = likely_rows(sizes, tuning)
    return (next((columns for columns in COLUMNS if likely <= 8 * columns), COLUMNS[-1]),)


def _kernel(x: Rows, weight: Int4Weight, routing: Routing, gated: bool, variant: Variant | None) -> Kernel:
    """weight is repacked.  variant: columns of a tile; None: chosen by the sizes."""
    assert weight.zeros is not None
    groups = int4_layout.groups_per_block(weight.group_size)
    (columns,) = variant or choose(routing.sizes, 0, 0)
    pairs = -(-weight.in_features // (2 * BLOCK))  # of blocks
    dtype = x.values.dtype if isinstance(x, Fp8Rows) else x.dtype
    return Kernel(
        entry="grouped_w4a16_gemm",
        source=SOURCE,
        defines=defines(dtype, columns, groups, gated),
        tile_rows=8 * columns,
        row_bytes=pairs * 2 * (2 * BLOCK + 8 * groups),  # features in 16 bits, and two sums of each group
        channel_scale=weight.zeros,
        group_scales=weight.scales,
    )


grouped_int4_mm = partial(grouped_gemm.grouped_int4_mm, _kernel)
