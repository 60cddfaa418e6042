"""The grouped GEMM of 16-bit rows and 4-bit integers whose experts have some 16 rows and more: libraries and launch.

Hopper only.  It reads the order of grouped_w4a16_gemm.  Its products are a warpgroup's, so weights are expanded once
for up to 64 rows, to 16-bit numbers; that kernel multiplies exact integers, and scales sums of groups.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda.skinny_gemm_w4a16 import INPUTS
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda import grouped_gemm
from slipstream_kernels.moe.cuda.grouped_gemm import Kernel, Rows, tile_of_most
from slipstream_kernels.moe.cuda.grouped_gemm import Variant as AnyVariant
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_w4a16_wide.cu"


class Variant(NamedTuple):
    """tile_rows: of a tile of tokens.  ctas: of an SM, as registers and shared memory allow."""

    tile_rows: int
    ctas: int


VARIANTS = (Variant(32, 3), Variant(48, 2), Variant(64, 2))
DTYPES = (torch.bfloat16, torch.float16)


def defines(dtype: torch.dtype, variant: Variant, groups_per_block: int) -> tuple[str, ...]:
    """The macros that choose a library; groups: 1 (of 128, or whole rows) or 2 (of 64)."""
    return (
        f"SLIPSTREAM_TILE_ROWS={variant.tile_rows}",
        f"SLIPSTREAM_CTAS={variant.ctas}",
        f"SLIPSTREAM_INPUT={INPUTS[dtype]}",
        f"SLIPSTREAM_GROUPS={groups_per_block}",
    )


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(*variant) for variant in itertools.product(DTYPES, VARIANTS, (1, 2))]


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning = H200) -> Variant:
    """The smallest tile that holds the rows of most experts.  Arguments as of grouped_w4a16_gemm.choose."""
    return tile_of_most(VARIANTS, sizes, tuning)


def kernel_of(x: Rows, weight: Int4Weight, routing: Routing, gated: bool, variant: AnyVariant | None) -> Kernel:
    """weight is repacked.  variant: a Variant; None: chosen by the sizes.  Raises ValueError for e4m3 rows."""
    if isinstance(x, Fp8Rows):
        raise ValueError("x: rows are e4m3, not bfloat16 or float16")
    assert weight.zeros is not None
    chosen = choose(routing.sizes, 0, 0) if variant is None else Variant(*variant)
    return Kernel(
        entry="grouped_w4a16_wide",
        source=SOURCE,
        defines=defines(x.dtype, chosen, int4_layout.groups_per_block(weight.group_size)),
        tile_rows=chosen.tile_rows,
        row_bytes=2 * weight.in_features,
        channel_scale=weight.zeros,
        group_scales=weight.scales,
        gates=False,
    )


grouped_int4_mm = partial(grouped_gemm.grouped_int4_mm, kernel_of)
