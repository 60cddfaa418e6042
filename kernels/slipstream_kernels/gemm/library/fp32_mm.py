"""Products that are not rounded to the type of their rows."""

from __future__ import annotations

import torch


def fp32_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in fp32.  x: [num_tokens, in_features].  weight: [out_features, in_features], of the same dtype."""
    if x.device.type == "cuda" and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()
