"""The arguments of one paged-attention call, as they cross from ops to an implementation.

Plain data, already checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionCall:
    """Shapes and meaning: ops.paged_attention."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    sliding_window: int | None
    alibi_slopes: torch.Tensor | None
    soft_cap: float | None
    num_kv_splits: int | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    fp8_queries: bool = False
    fp8_probs: bool = False
    key_mean: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
