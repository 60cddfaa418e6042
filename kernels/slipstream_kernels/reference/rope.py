"""rope in plain torch."""

from __future__ import annotations

import torch


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    rotary_dim: int,
    interleaved: bool,
) -> None:
    """See ops.rope."""
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        if interleaved:
            first, second = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
        else:
            first, second = x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
        rotated_first = first * cos - second * sin
        rotated_second = second * cos + first * sin
        first.copy_(rotated_first)
        second.copy_(rotated_second)
