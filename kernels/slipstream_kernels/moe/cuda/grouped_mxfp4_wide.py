"""The grouped GEMM of bf16 rows and MXFP4 weights whose experts have some ten rows and more: libraries and launch.

Hopper only.  Its products are a warpgroup's, so weights are expanded once for up to 96 rows; grouped_mxfp4_gemm
expands them again for every 16.  CUDA-graph safe, as that is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.launch import launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda.grouped_mxfp4_gemm import arguments, rows_of
from slipstream_kernels.moe.grouped_mxfp4_layout import INPUTS
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.norm.gated_mul import silu_mul
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
SPREAD = 1.25  # an expert with 25 rows on average has more than 32 in one case of twelve


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
    _, num_rows, num_experts = sizes
    rows = SPREAD * num_rows / num_experts
    return next((variant for variant in VARIANTS if variant.tile_rows >= rows), VARIANTS[-1])


def grouped_int4_mm(
    x: torch.Tensor,
    weight: Int4Weight,
    routing: Routing,
    by_token: bool,
    gated: bool,
    variant: Variant | None = None,
) -> torch.Tensor:
    """See grouped_mxfp4_gemm.grouped_int4_mm.  Two launches: the first puts x in the order of the tiles."""
    x = rows_of(x)
    out_features = weight.out_features // routing.num_experts
    variant = variant or choose(routing.sizes, out_features, 0)
    out = torch.empty((routing.num_rows, out_features), dtype=x.dtype, device=x.device)
    if routing.num_rows:
        params = arguments(x, weight, routing, out, variant.tile_rows, by_token=by_token)
        permuted = workspace(weight, params.max_token_tiles * variant.tile_rows)
        params.permuted_x, params.is_dependent = permuted.data_ptr(), launches_dependently(x.device)
        launch("grouped_mxfp4_wide", load(SOURCE, defines(variant)), params, x.device)
    return silu_mul(out) if gated else out


def workspace(weight: Int4Weight, num_rows: int) -> torch.Tensor:
    """Uninitialised, for the rows of all tiles: whole units of input features."""
    units = -(-weight.in_features // INPUTS)
    return torch.empty(num_rows * units * INPUTS, dtype=torch.bfloat16, device=weight.packed.device)
