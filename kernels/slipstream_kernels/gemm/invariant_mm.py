"""invariant_mm: contract and choice.  A product whose rows do not depend on each other, nor on their number."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.select import FLOAT_DTYPES, require_float, require_shape, require_unit_stride, select

SCALED_DTYPES = (E4M3, torch.int8)


def invariant_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Return x @ (weight * scales[:, None]).T + bias as [num_tokens, out_features], accumulated in fp32.

    x: [num_tokens, in_features] fp32, bf16 or fp16, last dimension contiguous; the result has its dtype.
    weight: [out_features, in_features], contiguous, of x's dtype, or e4m3 or int8 with scales: fp32 [out_features].
    bias: [out_features], any float dtype.
    The same row gives the same bits alone and in any company: sums are split at fixed input features.
    That is triton's; the reference's rows agree to fp32's rounding.  Source: "Defeating Nondeterminism in LLM
    Inference", Thinking Machines Lab, 2025.
    """
    require_float("x", x)
    require_unit_stride("x", x)
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected contiguous [out_features, in_features]")
    out_features, in_features = weight.shape
    require_shape("x", x, (x.shape[0], in_features))
    if weight.dtype not in (x.dtype, *SCALED_DTYPES):
        raise ValueError(f"weight: dtype {weight.dtype}, expected {x.dtype}, {E4M3} or {torch.int8}")
    if weight.dtype in FLOAT_DTYPES:
        if scales is not None:
            raise ValueError(f"scales: a weight of {weight.dtype} has none")
    elif scales is None or scales.dtype != torch.float32:
        raise ValueError(f"scales: a weight of {weight.dtype} needs fp32 scales")
    else:
        require_shape("scales", scales, (out_features,))
    if bias is not None:
        require_shape("bias", bias, (out_features,))
    return select("gemm.invariant_mm", backend, x).invariant_mm(x, weight, scales, bias)
