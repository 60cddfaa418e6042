"""The grouped GEMM of bf16 rows and MXFP4 weights in canonical order: its libraries, arguments, launch.  Hopper only.

No device value is read on the host, and the grid depends on the numbers of rows and experts alone: CUDA-graph safe.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import is_hopper
from slipstream_kernels.cuda.launch import addresses, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda.grouped_gemm import MAX_EXPERTS, GroupedGemmParams, likely_rows
from slipstream_kernels.moe.product import Product
from slipstream_kernels.moe.tuning import Tuning
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.routing import Routing

SOURCE = "sm90_grouped_mxfp4_gemm.cu"
FEATURES = 32  # output features that go together


class Variant(NamedTuple):
    """columns: of 8 rows, of a tile of tokens.  is_wide: CTAs of 128 output features, which read x less often, not 32.

    most_rows: of likely_rows, up to which it is chosen.
    """

    columns: int
    is_wide: bool
    most_rows: int


# 32 experts of 5760 x 2880, 16 | 25 rows each: 186 | 259 us with two columns, 196 | 228 of wide CTAs
VARIANTS = (Variant(1, False, 8), Variant(2, False, 27), Variant(4, True, 1 << 30))


def defines(variant: Variant) -> tuple[str, ...]:
    """The macros that choose a library."""
    return (f"SLIPSTREAM_COLUMNS={variant.columns}", f"SLIPSTREAM_WIDE={int(variant.is_wide)}")


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(variant) for variant in VARIANTS]


def refusal(product: Product) -> str | None:
    """Why this kernel cannot make a product with canonical MXFP4 weights; None if it can."""
    weight = product.weight
    if weight.device.type != "cuda" or not is_hopper(weight.device):
        return f"{weight.device} is not a Hopper GPU (compute capability 9.0)"
    if product.dtype != torch.bfloat16:
        return f"rows are {product.dtype}, not bfloat16"
    if weight.num_experts > MAX_EXPERTS:
        return f"{weight.num_experts} experts are more than {MAX_EXPERTS}"
    if weight.out_features % FEATURES:
        return f"out_features: {weight.out_features} of an expert are not a multiple of {FEATURES}"
    return missing(SOURCE, defines(VARIANTS[0]))


def choose(sizes: tuple[int, int, int], out_features: int, num_sms: int, tuning: Tuning) -> Variant:
    """The fastest by the number of rows of most experts.

    sizes: numbers of tokens, of rows and of experts.  out_features, num_sms: do not matter here.
    """
    likely = likely_rows(sizes, tuning)
    return next(variant for variant in VARIANTS if likely <= variant.most_rows)


def grouped_int4_mm(
    x: torch.Tensor | Fp8Rows,
    weight: Int4Weight,
    routing: Routing,
    by_token: bool,
    gated: bool,
    variant: Variant = VARIANTS[0],
) -> torch.Tensor:
    """See ops.grouped_int4_mm; weight is canonical MXFP4, x is bf16.  One launch, and one for silu(gate) * up if
    gated."""
    assert isinstance(x, torch.Tensor) and weight.is_e2m1
    x = x if x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    out_features = weight.out_features // routing.num_experts
    out = torch.empty((routing.num_rows, out_features), dtype=x.dtype, device=x.device)
    if routing.num_rows:
        params = arguments(x, weight, routing, out, variant.columns, by_token=by_token)
        params.is_dependent = launches_dependently(x.device)
        launch("grouped_mxfp4_gemm", load(SOURCE, defines(variant)), params, x.device)
    return silu_mul(out) if gated else out


def arguments(
    x: torch.Tensor, weight: Int4Weight, routing: Routing, out: torch.Tensor, columns: int, *, by_token: bool
) -> GroupedGemmParams:
    """What the kernel is launched with, its way of launching aside."""
    tensors = {
        "x": x, "tokens": routing.tokens if by_token else None, "offsets": routing.offsets, "qweight": weight.packed,
        "group_scales": weight.scales, "out": out,
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
