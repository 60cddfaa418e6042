"""The arguments of one latent-attention call, as they cross from ops to an implementation.

Plain data, already checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream_kernels.latent_cache import LatentCache


@dataclass(frozen=True)
class LatentCall:
    """Shapes and meaning: ops.latent_attention. positions: ops.invariant_latent_attention's."""

    q: torch.Tensor
    cache: LatentCache
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    tree_mask: torch.Tensor | None
    out: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    is_prefix_settled: bool = False
    positions: torch.Tensor | None = None

    @property
    def rows(self) -> torch.Tensor:
        return self.cache.rows

    @property
    def rank(self) -> int:
        return self.cache.rank

    @property
    def rope_dim(self) -> int:
        return self.cache.rope_dim
