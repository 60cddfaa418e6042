"""All layers of a decoder as the arguments of one fused decode kernel: weights, norms and caches.  Plain data.

A weight is a bf16 tensor [out_features, in_features], ScaledRows, or a prepacked Int4Weight, the same kind throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.rotation import Rope


@dataclass(frozen=True)
class ScaledRows:
    """values: [out_features, in_features] e4m3.  scales: [out_features] fp32."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


StackWeight = torch.Tensor | ScaledRows | Int4Weight


@dataclass(frozen=True)
class StackLayer:
    """qkv: query heads, then key heads, then value heads.  gate_up: gate's rows, then up's.  Norms: [hidden_size]."""

    qkv: StackWeight
    o: StackWeight
    gate_up: StackWeight
    down: StackWeight
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    cache: KvCache

    @property
    def products(self) -> tuple[StackWeight, StackWeight, StackWeight, StackWeight]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, eq=False)
class LayerStack:
    """rope: rotates whole heads, in pairs (i, i + head_dim/2).  scale: of scores, usually head_dim ** -0.5.

    Compared by identity, so that it can be the key of a cache.
    """

    layers: tuple[StackLayer, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    eps: float
    scale: float


@dataclass(frozen=True)
class StackRows:
    """One token of each request.  positions, slot_mapping: [T] int64.  seq_lens: [T] int32, these tokens included.

    block_tables: [T, max_blocks] int32.  slot -1 stores nothing; seq_len 0 pads: its row attends to nothing.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


def shape_of(weight: StackWeight) -> tuple[int, int]:
    """(out_features, in_features)."""
    if isinstance(weight, Int4Weight):
        return weight.out_features, weight.in_features
    rows, columns = weight.shape
    return rows, columns
