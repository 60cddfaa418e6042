"""invariant_grouped_mm in plain torch: the reference of grouped products."""

from __future__ import annotations

import torch

from slipstream_kernels.moe.reference.grouped_mm import grouped_mm
from slipstream_kernels.routing import Routing


def invariant_grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, scales: torch.Tensor | None, by_token: bool
) -> torch.Tensor:
    """See ops.invariant_grouped_mm."""
    return grouped_mm(x, weight, routing, scales, by_token, False)
