"""grouped_mm in plain torch: expert by expert, both operands dequantised.  Reads the offsets on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.reference.scaled_mm import dequantize_rows, dequantize_weight
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.norm.reference.gated_mul import gated_mul
from slipstream_kernels.routing import Routing


def grouped_mm(
    x: torch.Tensor | Fp8Rows | Int8Rows,
    weight: torch.Tensor,
    routing: Routing,
    scales: torch.Tensor | None,
    by_token: bool,
    gated: bool,
) -> torch.Tensor:
    """See ops.grouped_mm."""

    def weight_of(expert: int) -> torch.Tensor:
        return weight[expert].float() if scales is None else dequantize_weight(weight[expert], scales[expert])

    return by_expert(x, weight.shape[1], weight_of, routing, by_token, gated)


def by_expert(
    x: torch.Tensor | Fp8Rows | Int8Rows,
    out_features: int,
    weight_of: Callable[[int], torch.Tensor],
    routing: Routing,
    by_token: bool,
    gated: bool,
) -> torch.Tensor:
    """The grouped product with weights in fp32 [out_features, in_features] as weight_of(expert) gives them."""
    if isinstance(x, Fp8Rows):
        rows = dequantize_rows(x)
    else:
        rows = x.values.float() * x.scales[:, None] if isinstance(x, Int8Rows) else x.float()
    rows = rows[routing.tokens.long()] if by_token else rows
    out = torch.empty((routing.num_rows, out_features), dtype=x.dtype, device=rows.device)
    bounds = routing.offsets.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin < end:
            out[begin:end] = (rows[begin:end] @ weight_of(expert).t()).to(x.dtype)
    return gated_mul(out, "silu", None) if gated else out
