"""The grouped GEMM of bf16 rows and MXFP4 weights whose experts have some ten rows and more: libraries and launch.

Hopper only.  Its products are a warpgroup's, so weights are expanded once for up to 96 rows; grouped_mxfp4_gemm
expands them again for every 16.  CUDA-graph safe, as that is.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda import grouped_gemm
from slipstream_kernels.moe.cuda.grouped_gemm import Kernel, Rows, tile_of_most
from slipstream_kernels.moe.cuda.grouped_gemm import Variant as AnyVariant
from slipstream_kernels.moe.cuda.grouped_mxfp4_gemm import require_bf16
from slipstream_kernels.moe.grouped_mxfp4_layout import INPUTS
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_mxfp4_wide.cu"


class Variant(NamedTuple):
    """A CTA has a tile of tile_rows rows and 128 output features.

    stage_units: of 64 input features, of a stage of its ring.  ctas: of an SM, as registers and shared memory allow.
    """

    tile_rows: int
    stage_units: int
    stages: int
    ctas: int


VARIANTS = (Variant(32, 4, 2, 3), Variant(48, 2, 3, 3), Variant(64, 4, 2, 2), Variant(96, 2, 3, 2))


def defines(variant: Variant) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (
        f"SLIPSTREAM_TILE_ROWS={variant.tile_rows}",
        f"SLIPSTREAM_STAGE_UNITS={variant.stage_units}",
        f"SLIPSTREAM_STAGES={variant.stages}",
        f"SLIPSTREAM_CTAS={variant.ctas}",
    )


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(variant) for variant in VARIANTS]


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning = H200) -> Variant:
    """The smallest tile that holds the rows of most experts.  Arguments as of grouped_mxfp4_gemm.choose."""
    return tile_of_most(VARIANTS, sizes, tuning)


def kernel_of(x: Rows, weight: Int4Weight, routing: Routing, gated: bool, variant: AnyVariant | None) -> Kernel:
    """weight is repacked.  variant: a Variant; None: chosen by the sizes.  Raises ValueError unless rows are bf16."""
    require_bf16(x)
    chosen = choose(routing.sizes, 0, 0) if variant is None else Variant(*variant)
    units = -(-weight.in_features // INPUTS)
    return Kernel(
        entry="grouped_mxfp4_wide",
        source=SOURCE,
        defines=defines(chosen),
        tile_rows=chosen.tile_rows,
        row_bytes=2 * INPUTS * units,
        gates=False,
    )


grouped_int4_mm = partial(grouped_gemm.grouped_int4_mm, kernel_of)
