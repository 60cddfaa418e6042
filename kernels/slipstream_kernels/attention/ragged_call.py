"""The arguments of one ragged-attention call, as they cross from ops to an implementation.

Plain data, already checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedCall:
    """Shapes and meaning: ops.ragged_attention."""

    q: torch.Tensor
    k: torch.Tensor
    k_rope: torch.Tensor
    v: torch.Tensor
    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    key_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    max_query_len: int
    max_key_len: int
    scale: float
    is_causal: bool
