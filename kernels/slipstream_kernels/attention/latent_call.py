"""The arguments of one latent-attention call, as they cross from ops to an implementation.

Plain data, already checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream_kernels.attention.attention_call import AttentionMetadata
from slipstream_kernels.latent_cache import LatentCache


@dataclass(frozen=True)
class LatentCall:
    """Shapes and meaning: ops.latent_attention."""

    q: torch.Tensor
    cache: LatentCache
    metadata: AttentionMetadata
    scale: float
    out: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        return self.cache.rows

    @property
    def rank(self) -> int:
        return self.cache.rank

    @property
    def rope_dim(self) -> int:
        return self.cache.rope_dim
