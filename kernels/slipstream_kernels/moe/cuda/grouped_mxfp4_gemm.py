"""The grouped GEMM of bf16 rows and MXFP4 weights in the order of grouped_mxfp4_layout: libraries, arguments, launch.

Hopper only.  No device value is read on the host, and the grid depends on the numbers of rows and experts alone:
CUDA-graph safe.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.cuda.launch import addresses, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe import grouped_mxfp4_layout
from slipstream_kernels.moe.cuda import grouped_gemm
from slipstream_kernels.moe.cuda.grouped_gemm import GroupedGemmParams, likely_rows
from slipstream_kernels.moe.tuning import H200, Tuning
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_mxfp4_gemm.cu"
DEQUANTISE = "sm90_grouped_mxfp4_dequantise.cu"


class Variant(NamedTuple):
    """A CTA has tiles of 8 * columns tokens, and team_warps * 32 output features, whose input features teams divide."""

    columns: int
    team_warps: int
    teams: int

    @property
    def features(self) -> int:
        return 32 * self.team_warps


# us of 32 experts of 5760 x 2880 | 2880 x 2880, 4 of a token: 1 token 16.6 | 9.8 (FEWEST), 17.0 | 14.7 (FEW); 32 tokens
# 75.9 | 43.4 (FEW), 79.5 | 45.5 (FEW_OF_MANY); 64 tokens 101.7 | 56.7 (FEW), 87.2 | 54.1 (MORE).  64 tokens of 128
# experts of 5760 x 2880: 267 (FEW), 243 (FEW_OF_MANY).
FEWEST, FEW, FEW_OF_MANY, MORE = Variant(1, 1, 8), Variant(1, 4, 2), Variant(1, 4, 1), Variant(2, 4, 1)
VARIANTS = (FEWEST, FEW, FEW_OF_MANY, MORE)
FEWEST_ROWS, FEW_ROWS = 8, 8.0  # the most rows of all experts of FEWEST; the most likely_rows of one column
MANY_CTAS = 20  # of an SM, from which on teams gain nothing


def defines(variant: Variant) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (
        f"SLIPSTREAM_COLUMNS={variant.columns}",
        f"SLIPSTREAM_TEAM_WARPS={variant.team_warps}",
        f"SLIPSTREAM_TEAMS={variant.teams}",
    )


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(variant) for variant in VARIANTS]


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why this format cannot hold a canonical weight of so many experts; None if it can."""
    if (reason := grouped_gemm.refusal(weight, num_experts)) is not None:
        return reason
    sizes = grouped_mxfp4_layout.refusal(weight.out_features // num_experts, weight.in_features)
    return sizes or build_refusal(SOURCE, defines(VARIANTS[0])) or build_refusal(DEQUANTISE, ())


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning = H200) -> Variant:
    """The fastest by the number of rows of most experts, and by that of CTAs.

    sizes: numbers of tokens, of rows and of experts.  out_features: of an expert.
    """
    _, num_rows, num_experts = sizes
    if num_rows <= FEWEST_ROWS:
        return FEWEST
    if likely_rows(sizes, tuning) > FEW_ROWS:
        return MORE
    ctas = min(num_rows, num_experts) * -(-out_features // FEW.features)
    return FEW if ctas < MANY_CTAS * num_sms else FEW_OF_MANY


def grouped_int4_mm(
    x: torch.Tensor | Fp8Rows,
    weight: Int4Weight,
    routing: Routing,
    by_token: bool,
    gated: bool,
    variant: Variant | None = None,
) -> torch.Tensor:
    """See ops.grouped_int4_mm; weight is repacked MXFP4.  One launch, and one for silu(gate) * up if gated.

    variant: None: chosen by the sizes.  Raises ValueError for rows that are not bf16.
    """
    x = require_bf16(x)
    x = x if x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    out_features = weight.out_features // routing.num_experts
    variant = variant or choose(routing.sizes, out_features, count_sms(x.device))
    out = torch.empty((routing.num_rows, out_features), dtype=x.dtype, device=x.device)
    if routing.num_rows:
        params = arguments(x, weight, routing, out, variant.columns, by_token=by_token)
        params.is_dependent = launches_dependently(x.device)
        launch("grouped_mxfp4_gemm", load(SOURCE, defines(variant)), params, x.device)
    return silu_mul(out) if gated else out


def require_bf16(x: torch.Tensor | Fp8Rows) -> torch.Tensor:
    """The rows.  Raises ValueError for others."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
        found = x.dtype if isinstance(x, torch.Tensor) else x.values.dtype
        raise ValueError(f"x: rows are {found}, not bfloat16, which repacked MXFP4 weights are multiplied by")
    return x


def written_out(weight: Int4Weight) -> torch.Tensor:
    """[out_features of all experts, in_features] bf16 of a repacked weight, exactly.  One launch."""
    device = weight.packed.device
    out = torch.empty((weight.out_features, weight.in_features), dtype=torch.bfloat16, device=device)
    params = GroupedGemmParams(
        **addresses({"qweight": weight.packed, "out": out}),
        out_features=weight.out_features,
        in_features=weight.in_features,
        is_dependent=launches_dependently(device),
    )
    launch("grouped_mxfp4_dequantise", load(DEQUANTISE, ()), params, device)
    return out


def arguments(
    x: torch.Tensor, weight: Int4Weight, routing: Routing, out: torch.Tensor, columns: int, *, by_token: bool
) -> GroupedGemmParams:
    """What the kernel is launched with, its way of launching aside."""
    tensors = {
        "x": x, "tokens": routing.tokens if by_token else None, "offsets": routing.offsets, "qweight": weight.packed,
        "out": out,
    }  # fmt: skip
    return GroupedGemmParams(
        **addresses(tensors),
        x_row_stride=x.stride(0),
        num_experts=routing.num_experts,
        out_features=weight.out_features // routing.num_experts,
        in_features=weight.in_features,
        max_token_tiles=routing.max_tiles(8 * columns),
        num_rows=routing.num_rows,
    )
