"""The grouped GEMM of 16-bit rows and 4-bit integers whose experts have some 16 rows and more: libraries and launch.

Hopper only.  It reads the order of grouped_w4a16_gemm.  Its products are a warpgroup's, so weights are expanded once
for up to 64 rows, to 16-bit numbers; that kernel multiplies exact integers, and scales sums of groups.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda.skinny_gemm_w4a16 import INPUTS
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda import grouped_gemm
from slipstream_kernels.moe.cuda.grouped_gemm import Kernel, Rows, Variant
from slipstream_kernels.moe.cuda.grouped_mxfp4_wide import SPREAD
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_w4a16_wide.cu"


class Tile(NamedTuple):
    """rows: of a tile of tokens.  ctas: of an SM, as registers and shared memory allow."""

    rows: int
    ctas: int


TILES = (Tile(32, 3), Tile(48, 2), Tile(64, 2))
DTYPES = (torch.bfloat16, torch.float16)


def defines(dtype: torch.dtype, tile: Tile, groups_per_block: int) -> tuple[str, ...]:
    """The macros that choose a library; groups: 1 (of 128, or whole rows) or 2 (of 64)."""
    return (
        f"SLIPSTREAM_TILE_ROWS={tile.rows}",
        f"SLIPSTREAM_CTAS={tile.ctas}",
        f"SLIPSTREAM_INPUT={INPUTS[dtype]}",
        f"SLIPSTREAM_GROUPS={groups_per_block}",
    )


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(*variant) for variant in itertools.product(DTYPES, TILES, (1, 2))]


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning = H200) -> Tile:
    """The smallest tile that holds the rows of most experts.  Arguments as of grouped_w4a16_gemm.choose."""
    _, num_rows, num_experts = sizes
    return next((tile for tile in TILES if tile.rows >= SPREAD * num_rows / num_experts), TILES[-1])


def kernel_of(x: Rows, weight: Int4Weight, routing: Routing, gated: bool, variant: Variant | None) -> Kernel:
    """weight is repacked.  variant: a Tile; None: chosen by the sizes."""
    assert weight.zeros is not None and isinstance(x, torch.Tensor)
    tile = choose(routing.sizes, 0, 0) if variant is None else Tile(*variant)
    return Kernel(
        entry="grouped_w4a16_wide",
        source=SOURCE,
        defines=defines(x.dtype, tile, int4_layout.groups_per_block(weight.group_size)),
        tile_rows=tile.rows,
        row_bytes=2 * weight.in_features,
        channel_scale=weight.zeros,
        group_scales=weight.scales,
    )


def grouped_int4_mm(
    x: Rows, weight: Int4Weight, routing: Routing, by_token: bool, gated: bool, variant: Variant | None = None
) -> torch.Tensor:
    """See ops.grouped_int4_mm.  Three launches if gated.  Raises ValueError for rows that are not 16-bit numbers."""
    if isinstance(x, Fp8Rows):
        raise ValueError("x: rows are e4m3, not bfloat16 or float16")
    y = grouped_gemm.grouped_int4_mm(kernel_of, x, weight, routing, by_token, False, variant)
    return silu_mul(y) if gated else y
