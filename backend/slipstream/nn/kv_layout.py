"""KVLayout: the cache planes of a layer, defined by its attention kind. Plain data.

Pool, memory plan, offload and compaction walk the planes; only attention knows their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from slipstream_kernels import ops
from torch import Tensor

LayerCache = ops.KvCache | ops.LatentCache  # of one layer, by its attention's kind


@dataclass(frozen=True)
class KVPlane:
    """A tensor [num_blocks, num_heads, block_size, width]; width 0: without the last dimension, one element per row.

    per_request: one per request instead of one per token (recurrent state).
    """

    name: str
    num_heads: int
    width: int
    dtype: torch.dtype
    per_request: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * max(self.width, 1) * self.dtype.itemsize

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, self.num_heads, block_size, *((self.width,) if self.width else ()))


@dataclass(frozen=True)
class KVLayout:
    planes: tuple[KVPlane, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(plane.bytes_per_token for plane in self.planes)

    def empty(self, num_blocks: int, block_size: int, device: torch.device) -> dict[str, Tensor]:
        """Zeroed tensors of one layer by plane; ops.empty_kv_cache says why zeros."""
        return {
            plane.name: torch.zeros(plane.shape(num_blocks, block_size), dtype=plane.dtype, device=device)
            for plane in self.planes
        }


def key_value_layout(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayout:
    """Planes of keys and values, with per-token scales if the dtype has them, as in ops.KvCache."""
    cache = ops.empty_kv_cache((1, num_kv_heads, 1, head_dim), dtype, torch.device("meta"))
    held = {name: getattr(cache, name) for name in ("key", "value", "key_scale", "value_scale")}
    return KVLayout(
        tuple(
            KVPlane(name, num_kv_heads, prod(tensor.shape[3:]) if tensor.dim() > 3 else 0, tensor.dtype)
            for name, tensor in held.items()
            if tensor is not None
        )
    )


def key_value_cache(planes: Mapping[str, Tensor]) -> ops.KvCache:
    """The KvCache of planes of such a layout; per-head scales may replace per-token scales."""
    return ops.KvCache(planes["key"], planes["value"], planes.get("key_scale"), planes.get("value_scale"))


def latent_layout(rank: int, rope_dim: int, dtype: torch.dtype) -> KVLayout:
    """One plane of rows that all heads share, as in ops.LatentCache."""
    return KVLayout((KVPlane("latent", 1, *ops.latent_row(rank, rope_dim, dtype)),))
