"""The arguments of one decode-attention call, as they cross from ops to an implementation.

Plain data, already checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeCall:
    """Shapes and meaning: ops.decode_attention."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    max_query_len: int
    scale: float
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    tree_mask: torch.Tensor | None
    positions: torch.Tensor | None
    sliding_window: int | None
    alibi_slopes: torch.Tensor | None
    soft_cap: float | None
    is_prefix_settled: bool
    sinks: torch.Tensor | None = None
