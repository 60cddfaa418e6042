"""scale_logits in plain torch."""

from __future__ import annotations

import torch


def scale_logits(logits: torch.Tensor, factor: float, soft_cap: float | None) -> torch.Tensor:
    """See ops.scale_logits."""
    scaled = (logits.float() * factor).contiguous()
    return scaled if soft_cap is None else scaled.div_(soft_cap).tanh_().mul_(soft_cap)
