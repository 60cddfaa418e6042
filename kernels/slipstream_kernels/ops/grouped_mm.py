"""grouped_mm: contract and choice.  Rows sorted by expert times each expert's own weight, in 16 bits or FP8."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.ops.select import load_module, require_float, require_shape, require_unit_stride, select
from slipstream_kernels.routing import Routing

LIBRARY_ROWS = 256  # of an average expert, from which on the library is faster on an H200 (docs/LOG.md)
LIBRARY_ALIGNMENT = 16  # features of a weight that the library takes are multiples of it


def grouped_mm(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    routing: Routing,
    scales: torch.Tensor | None = None,
    *,
    by_token: bool = False,
    gated: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """y[r] = x[r] @ dequantised(weight[expert of row r]).T as [num_rows, out_features], accumulated in fp32.

    by_token: x has a row for each token, taken by all its pairs; else one for each row of the routing.
    gated: returns silu(y[:, :half]) * y[:, half:].
    x: fp32, bf16 or fp16, last dimension contiguous, or rows of e4m3 scaled per row; y has its dtype.
    weight: [num_experts, out_features, in_features], contiguous, of x's dtype, or e4m3 with scales: fp32
    [num_experts, out_features].  FP8 sums leave the tensor core for fp32 every 128 input features.
    backend: "library" is torch's grouped product of bf16, or of e4m3 rows and weights, beside the usual three.
    """
    num_experts, out_features, in_features = weight.shape
    check_rows(x, in_features, routing, by_token)
    if num_experts != routing.num_experts or not weight.is_contiguous():
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected contiguous of {routing.num_experts} experts")
    if gated and out_features % 2:
        raise ValueError(f"weight: {out_features} output features, gated products need pairs")
    if weight.dtype == E4M3:
        if scales is None or scales.dtype != torch.float32:
            raise ValueError(f"scales: a weight of {E4M3} needs fp32 scales")
        require_shape("scales", scales, (num_experts, out_features))
    elif isinstance(x, Fp8Rows) or weight.dtype != x.dtype or scales is not None:
        raise ValueError(f"weight: dtype {weight.dtype}, expected {E4M3} with scales, or that of 16- or 32-bit x")
    rows = x.values if isinstance(x, Fp8Rows) else x
    if backend == "library" or (backend == "auto" and _prefers_library(x, weight, routing)):
        module = load_module("library", "grouped_mm")
    else:
        module = select("grouped_mm", backend, rows)
    return module.grouped_mm(x, weight, routing, scales, by_token, gated)


def _prefers_library(x: torch.Tensor | Fp8Rows, weight: torch.Tensor, routing: Routing) -> bool:
    if not weight.is_cuda or routing.num_rows < LIBRARY_ROWS * routing.num_experts or x.dtype != torch.bfloat16:
        return False
    is_same_type = isinstance(x, Fp8Rows) == (weight.dtype == E4M3)
    is_aligned = all(size % LIBRARY_ALIGNMENT == 0 for size in weight.shape[1:])
    return is_same_type and is_aligned and bool(load_module("cuda", "device").is_hopper(weight.device))


def check_rows(x: torch.Tensor | Fp8Rows, in_features: int, routing: Routing, by_token: bool) -> None:
    """Raise ValueError unless x has the rows that a grouped product with this routing takes."""
    num_rows = routing.num_tokens if by_token else routing.num_rows
    if isinstance(x, Fp8Rows):
        require_shape("x.values", x.values, (num_rows, in_features))
        require_shape("x.scales", x.scales, (num_rows, 1))
        return
    require_float("x", x)
    require_shape("x", x, (num_rows, in_features))
    require_unit_stride("x", x)
