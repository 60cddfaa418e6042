"""The grouped GEMM of e4m3 operands: its libraries, the choice of a variant.  Hopper only; grouped_gemm launches it.

16-bit rows are quantised by the kernel that permutes them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from slipstream_kernels.cuda.build import build_refusal
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe import grouped_w4a8_layout
from slipstream_kernels.moe.cuda import grouped_gemm
from slipstream_kernels.moe.cuda.grouped_gemm import BLOCK, TILE, Kernel, Rows, likely_rows
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_w4a8_gemm.cu"
COLUMNS = (16, 32, 48, 64)  # rows of the tiles of tokens that are compiled
SUM_BYTES = 32  # of a row and eight blocks: two fp16 each


class Variant(NamedTuple):
    """columns: rows of a tile.  warpgroups_m: 64 output features each, of a CTA at once; 1 and 2 of 16 columns."""

    columns: int
    warpgroups_m: int = 4


VARIANTS = (Variant(16, 1), Variant(16, 2), *(Variant(columns) for columns in COLUMNS))


def defines(columns: int, gated: bool) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (f"SLIPSTREAM_COLUMNS={columns}", f"SLIPSTREAM_GATED={int(gated)}")


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(columns, gated) for columns in COLUMNS for gated in (False, True)]


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why this format cannot hold a canonical weight of so many experts; None if it can."""
    reason = grouped_gemm.refusal(weight, num_experts) or grouped_w4a8_layout.refusal(weight, num_experts)
    return reason or build_refusal(SOURCE, defines(COLUMNS[0], True))


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning = H200) -> Variant:
    """A tile that holds all rows of most experts.

    sizes: numbers of tokens, of rows and of experts.  out_features: of an expert.  Where that leaves CTAs few tiles of
    output features, their warpgroups divide the input features among them.
    """
    _, num_rows, num_experts = sizes
    likely = likely_rows(sizes, tuning)
    columns = next((columns for columns in COLUMNS if likely <= columns), COLUMNS[-1])
    tiles = min(num_rows, num_experts) * out_features / TILE / num_sms
    if columns > COLUMNS[0] or tiles > tuning.many_tiles:
        return Variant(max(columns, COLUMNS[1]))
    return Variant(columns, next((groups for groups in (1, 2) if tiles <= tuning.narrow_tiles * groups), 4))


def _kernel(x: Rows, weight: Int4Weight, routing: Routing, gated: bool, variant: grouped_gemm.Variant | None) -> Kernel:
    """weight is of grouped_w4a8_layout.repack_experts.  variant: None: chosen by the sizes."""
    out_features, blocks = weight.out_features // routing.num_experts, weight.in_features // BLOCK
    columns, warpgroups_m = variant or choose(routing.sizes, out_features, count_sms(weight.packed.device))
    return Kernel(
        entry="grouped_w4a8_gemm",
        source=SOURCE,
        defines=defines(columns, gated),
        tile_rows=columns,
        row_bytes=blocks * BLOCK + -(-blocks // 8) * SUM_BYTES,  # features, and sums of eight blocks at a time
        channel_scale=weight.scales,
        warpgroups_m=warpgroups_m,
    )


grouped_int4_mm = partial(grouped_gemm.grouped_int4_mm, _kernel)
