"""The arguments of attention over keys that lie side by side instead of in blocks.

Plain data.  Implementations get a call, already checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedKeys:
    """Keys and values of all requests; heads share a part of each key.  Last dimensions are contiguous, others strided.

    k: [num_keys, num_heads, nope].  k_rope: [num_keys, rope_dim].  v: [num_keys, num_heads, value_dim].
    """

    k: torch.Tensor
    k_rope: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class RaggedMetadata:
    """The requests of a step, and which rows of keys are theirs.

    query_start_loc, key_start_loc: [num_requests + 1] int32.  key_lens: [num_requests] int32: request r has the keys
    from key_start_loc[r] on, with any rows behind them.  max_query_len, max_key_len: host-side upper bounds.
    is_causal: row i of a request sees its keys up to key_len - query_len + i, else all.
    """

    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    key_lens: torch.Tensor
    max_query_len: int
    max_key_len: int
    is_causal: bool

    @property
    def num_requests(self) -> int:
        return self.key_lens.shape[0]


@dataclass(frozen=True)
class RaggedCall:
    """q, out, lse: as ops.ragged_attention takes and returns them."""

    q: torch.Tensor
    keys: RaggedKeys
    metadata: RaggedMetadata
    scale: float
    out: torch.Tensor
    lse: torch.Tensor
