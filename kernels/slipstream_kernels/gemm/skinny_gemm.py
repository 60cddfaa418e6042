"""skinny_gemm: contract.  Few tokens times a large weight: the time is that of reading the weight."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import BLOCK, E4M3
from slipstream_kernels.select import (
    FLOAT_DTYPES,
    require_bias,
    require_float,
    require_pairs,
    require_shape,
    require_unit_stride,
    select_cuda_or_reference,
)

INT8 = (torch.int8, torch.int32)  # int32: words of repack_int8


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Return x @ dequantised(weight).T + bias as [num_tokens, out_features], accumulated in fp32.

    gated: the first half of y's columns gates the second: returns silu(y[:, :half]) * y[:, half:], rounded once.
    x: [num_tokens, in_features] fp32, bf16 or fp16, last dimension contiguous; the result has its dtype.
    weight: [out_features, in_features], contiguous, of x's dtype, or with scales: int8 (fp32 [out_features], also as
    repack_int8 made it) or e4m3 (those, or `block_scales`).  Beside such weights x is not quantised: only the weight's
    own error remains.
    bias: [out_features] of x's dtype.  backend: "cuda" (Hopper, ValueError if it cannot run), "reference", "auto".
    A row of y does not depend on the other rows, nor on their number but for being up to 8, or 9 to 16 (the order of
    sums).  Calls on one device must be ordered, on one stream, with one call before any graph capture.
    There is no Triton-lang version: what this adds over its matmul, weights that are fetched before the kernel before
    has ended, and whole rows per SM, Triton-lang cannot say.
    """
    _check_weight(x, weight, scales)
    require_bias(bias, weight.shape[0], x.dtype)
    require_pairs(gated, weight.shape[0])
    version = select_cuda_or_reference(
        "gemm.skinny_gemm", backend, x.is_cuda, lambda cuda: cuda.refusal(x, weight, scales)
    )
    return version.skinny_gemm(x, weight, scales, bias, gated)


def _check_weight(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> None:
    require_float("x", x)
    require_unit_stride("x", x)
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected contiguous [out_features, in_features]")
    out_features, in_features = weight.shape
    if weight.dtype == torch.int32:
        in_features *= weight.itemsize
    require_shape("x", x, (x.shape[0], in_features))
    if weight.dtype in FLOAT_DTYPES:
        if weight.dtype != x.dtype:
            raise ValueError(f"weight: dtype {weight.dtype}, expected x's {x.dtype}, {E4M3} or int8")
        if scales is not None:
            raise ValueError(f"scales: a weight of {weight.dtype} has none")
        return
    if weight.dtype not in (E4M3, *INT8):
        raise ValueError(f"weight: dtype {weight.dtype}, expected {x.dtype}, {E4M3} or int8")
    if scales is None or scales.dtype != torch.float32:
        raise ValueError(f"scales: a weight of {weight.dtype} needs fp32 scales")
    if scales.dim() == 1 or weight.dtype in INT8:
        return require_shape("scales", scales, (out_features,))
    if in_features % BLOCK:
        raise ValueError(f"weight: {in_features} columns, block-wise scales need a multiple of {BLOCK}")
    columns = in_features // BLOCK
    require_shape("scales", scales, (-(-out_features // BLOCK), columns + -columns % 4))
