"""merge_attention in plain torch."""

from __future__ import annotations

import torch


def merge_attention(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """See ops.merge_attention."""
    both = torch.logaddexp(lse, other_lse)
    weights = [torch.exp(part - both).nan_to_num(0.0)[..., None] for part in (lse, other_lse)]  # -inf - -inf is NaN
    parts = [torch.where(weight > 0, part.float(), 0.0) for weight, part in zip(weights, (out, other))]
    out.copy_(parts[0] * weights[0] + parts[1] * weights[1])
    lse.copy_(both)
