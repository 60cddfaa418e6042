"""int8_mm in plain torch: float rows by fp32 products; int8 rows by exact integer sums."""

from __future__ import annotations

import torch

from slipstream_kernels.integer import Int8Rows


def int8_mm(
    x: torch.Tensor | Int8Rows,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.int8_mm."""
    if isinstance(x, Int8Rows):
        # fp64 holds the sums exactly, on every device; CPUs multiply integers many times slower
        sums = (x.values.double() @ values.double().t()).float()
        y = sums * (x.scales[:, None] * scales)
    else:
        y = (x.float() @ values.float().t()) * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)
