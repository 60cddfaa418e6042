"""invariant_grouped_mm: contract and choice.  A product of experts' rows that do not depend on each other."""

from __future__ import annotations

import torch

from slipstream_kernels.gemm.invariant_mm import SCALED_DTYPES
from slipstream_kernels.moe.grouped_mm import check_rows
from slipstream_kernels.routing import Routing
from slipstream_kernels.select import require_shape, select


def invariant_grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    scales: torch.Tensor | None = None,
    *,
    by_token: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """y[r] = x[r] @ (weight * scales[..., None])[expert of row r].T as [num_rows, out_features], accumulated in fp32.

    x: fp32, bf16 or fp16, last dimension contiguous, a row for each row of the routing; by_token: for each token.
    weight: [num_experts, out_features, in_features], contiguous, of x's dtype, or e4m3 or int8 with scales: fp32
    [num_experts, out_features].
    A row is the same to the bit whatever rows its expert and the others have, and is what ops.invariant_mm makes of
    it: sums are split at the same input features.  That is triton's; the reference's rows agree to fp32's rounding.
    """
    num_experts, out_features, in_features = weight.shape
    check_rows(x, in_features, routing, by_token)
    if num_experts != routing.num_experts or not weight.is_contiguous():
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected contiguous of {routing.num_experts} experts")
    if weight.dtype not in (x.dtype, *SCALED_DTYPES):
        raise ValueError(f"weight: dtype {weight.dtype}, expected {x.dtype} or one of {SCALED_DTYPES}")
    if (scales is None) is (weight.dtype in SCALED_DTYPES):
        raise ValueError(f"scales: a weight of {weight.dtype} {'needs some' if scales is None else 'has none'}")
    if scales is not None:
        require_shape("scales", scales, (num_experts, out_features))
        if scales.dtype != torch.float32 or not scales.is_contiguous():
            raise ValueError("scales: must be contiguous and float32")
    y: torch.Tensor = select("moe.invariant_grouped_mm", backend, x).invariant_grouped_mm(
        x, weight, routing, scales, by_token
    )
    return y
