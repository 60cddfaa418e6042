"""rms_norm in plain torch, with the rounding steps of Hugging Face's LlamaRMSNorm."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See ops.rms_norm."""
    summed = x if residual is None else x + residual
    wide = summed.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = torch.mul(scaled.to(x.dtype), weight, out=out)
    return y if residual is None else (y, summed)
