"""scaled_mm: contract.  FP8 rows times FP8 weights, scaled per token and channel, or by blocks."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import BLOCK, E4M3, Fp8Rows
from slipstream_kernels.gemm.linear import linear
from slipstream_kernels.gemm.linear_weight import fp8_weight
from slipstream_kernels.select import load_module, require_shape, select

COUNTER_ROWS = 16  # scaled_mm has tiles of 32 output features or more, swap_ab_stream four counters for 64


def scaled_mm(
    rows: Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    counters: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Return dequantised(rows) @ dequantised(weight).T + bias as [num_tokens, out_features], accumulated in fp32.

    The result has rows.dtype.

    weight: [out_features, in_features] e4m3, contiguous.  scales, fp32: [out_features] (rows scaled per token), or
    `block_scales` of [ceil(out_features / 128), in_features / 128] (rows scaled per 128 columns).
    bias: [out_features], any float dtype.  counters: `scaled_mm_counters(weight)`, kept by the caller; without it one
    is made per call.
    Hopper's FP8 tensor cores accumulate with about 14 bits of fraction; every implementation here moves sums to fp32
    registers at least every 128 columns or uses the library's slow accumulation.  Source: arXiv:2412.19437, 3.3.2.
    backend: "library" is torch's scaled matmul (cuBLASLt), beside the usual three; "auto" is ops.linear's choice.
    """
    require_shape("weight", weight, (weight.shape[0], rows.values.shape[1]))
    if weight.dtype != E4M3 or rows.values.dtype != E4M3:
        raise ValueError(f"weight, rows: dtypes {weight.dtype}, {rows.values.dtype}, expected {E4M3}")
    require_scales(rows, weight, scales)
    if bias is not None:
        require_shape("bias", bias, (weight.shape[0],))
    if backend == "auto":
        counters = scaled_mm_counters(weight) if counters is None else counters
        return linear(rows, fp8_weight(weight, scales, bias, counters))
    is_library = backend == "library"
    module = load_module("library", "gemm.scaled_mm") if is_library else select("gemm.scaled_mm", backend, rows.values)
    y: torch.Tensor = module.scaled_mm(rows, weight, scales, bias, counters)
    return y


def scaled_mm_counters(weight: torch.Tensor) -> torch.Tensor:
    """Zeros that the split products of one weight are counted in; each call leaves them zero.  One stream at a time."""
    return torch.zeros(-(-weight.shape[0] // COUNTER_ROWS), dtype=torch.int32, device=weight.device)


def block_scales(out_features: int, in_features: int, device: torch.device) -> torch.Tensor:
    """Zeros for the scales of a block-wise weight: rows of in_features / 128, padded to the 16 bytes cuBLAS wants.

    Returns [ceil(out_features / 128), in_features / 128 rounded up to a multiple of 4].
    """
    columns = -(-in_features // BLOCK)
    return torch.zeros(-(-out_features // BLOCK), columns + -columns % 4, device=device)


def require_scales(rows: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise ValueError unless the scales of both operands fit them and each other."""
    out_features, in_features = weight.shape
    if scales.dim() == 1:
        require_shape("scales", scales, (out_features,))
        require_shape("rows.scales", rows.scales, (rows.num_tokens, 1))
        return
    if in_features % BLOCK:
        raise ValueError(f"weight: {in_features} columns, block-wise scales need a multiple of {BLOCK}")
    columns = in_features // BLOCK
    require_shape("scales", scales, (-(-out_features // BLOCK), columns + -columns % 4))
    require_shape("rows.scales", rows.scales, (rows.values.shape[0], columns))
