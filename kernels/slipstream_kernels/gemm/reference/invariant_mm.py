"""invariant_mm in plain torch: an fp32 product of the dequantised weight."""

from __future__ import annotations

import torch


def invariant_mm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """See ops.invariant_mm."""
    y = x.float() @ weight.float().t()
    if scales is not None:
        y = y * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)
