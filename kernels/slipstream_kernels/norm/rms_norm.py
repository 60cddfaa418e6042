"""rms_norm: contract and choice.  Optionally adds the residual first, as decoders need."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension by its root mean square: y = (x / sqrt(mean(x^2) + eps)).to(x.dtype) * weight.

    x: [num_tokens, size] or [num_tokens, num_heads, size] (a strided view is fine, last dimension contiguous).
    weight: [size], dtype of x.  Mean and scaling are fp32, as in Hugging Face's LlamaRMSNorm.
    With residual (shape and dtype of x): x + residual is rounded to x's dtype, normalised, and returned too: (y, x +
    residual).
    out: contiguous, receives y (may be x itself when x is contiguous).  Source: RMSNorm, arXiv:1910.07467.
    """
    require_float("x", x)
    if x.dim() not in (2, 3):
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [num_tokens, size] or [num_tokens, num_heads, size]")
    require_unit_stride("x", x)
    require_shape("weight", weight, (x.shape[-1],))
    if weight.dtype != x.dtype:
        raise ValueError(f"weight: dtype {weight.dtype}, expected x's {x.dtype}")
    if residual is not None:
        require_shape("residual", residual, x.shape)
        require_unit_stride("residual", residual)
        if residual.dtype != x.dtype:
            raise ValueError(f"residual: dtype {residual.dtype}, expected x's {x.dtype}")
    if out is not None:
        require_shape("out", out, x.shape)
        if out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(f"out: must be contiguous and {x.dtype}")
    return select("norm.rms_norm", backend, x).rms_norm(x, weight, eps, residual, out)
