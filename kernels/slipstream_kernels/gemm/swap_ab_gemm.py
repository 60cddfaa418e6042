"""swap_ab_gemm: contract.  Some tens to hundreds of tokens times a large weight."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm.scaled_mm import require_scales
from slipstream_kernels.select import (
    FLOAT_DTYPES,
    require_bias,
    require_float,
    require_pairs,
    require_shape,
    require_unit_stride,
    select_cuda_or_reference,
)


def swap_ab_gemm(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Return x @ weight.T + bias as [num_tokens, out_features], accumulated in fp32, both operands as dequantised.

    gated: the first half of y's columns gates the second: returns silu(y[:, :half]) * y[:, half:], rounded once.
    x: [num_tokens, in_features] bf16 or fp16, last dimension contiguous, with a weight of its dtype and no scales; or
    rows of e4m3 with an e4m3 weight and scales, both as ops.scaled_mm takes them.  The result has x.dtype.
    weight: [out_features, in_features], contiguous.  bias: [out_features] of x.dtype.
    Sums of e4m3 move to fp32 registers every 128 columns, as in ops.scaled_mm.
    backend: "cuda" (Hopper, at most 256 tokens, ValueError if it cannot run), "reference", "auto".  There is no
    Triton-lang version: clusters, and weights fetched before the kernel before has ended, it cannot say.
    """
    _check(x, weight, scales)
    require_bias(bias, weight.shape[0], x.dtype)
    require_pairs(gated, weight.shape[0])
    version = select_cuda_or_reference(
        "gemm.swap_ab_gemm", backend, weight.is_cuda, lambda cuda: cuda.refusal(x, weight)
    )
    return version.swap_ab_gemm(x, weight, scales, bias, gated)


def _check(x: torch.Tensor | Fp8Rows, weight: torch.Tensor, scales: torch.Tensor | None) -> None:
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected contiguous [out_features, in_features]")
    if isinstance(x, Fp8Rows):
        require_shape("x", x.values, (x.values.shape[0], weight.shape[1]))
        if weight.dtype != E4M3:
            raise ValueError(f"weight: dtype {weight.dtype}, expected {E4M3} as x")
        if scales is None:
            raise ValueError(f"scales: a weight of {E4M3} needs fp32 scales")
        return require_scales(x, weight, scales)
    require_float("x", x)
    require_unit_stride("x", x)
    require_shape("x", x, (x.shape[0], weight.shape[1]))
    if weight.dtype != x.dtype or weight.dtype not in FLOAT_DTYPES:
        raise ValueError(f"weight: dtype {weight.dtype}, expected x's {x.dtype}")
    if scales is not None:
        raise ValueError(f"scales: a weight of {weight.dtype} has none")
