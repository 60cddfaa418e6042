"""The attention backend over slipstream_kernels' paged ops: any mix of prefill, chunks and decode in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention.backend import ATTENTION_BACKENDS, HeadTurn, LayerCache
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_types import gpu_geometry_refusal
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class PagedStep:
    batch: ForwardBatch
    scale: float
    sliding_windows: tuple[int | None, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, cache: LayerCache, layer: int) -> Tensor:
        batch = self.batch
        q = ops.rope_write_kv(q, k, v, batch.positions, batch.slot_mapping, turn.rope, cache, turn.norms)
        return ops.paged_attention(
            q,
            cache.key,
            cache.value,
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=self.scale,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            sliding_window=self.sliding_windows[layer],
        )


@ATTENTION_BACKENDS.register("paged")
class PagedAttention:
    def __init__(self, spec: DecoderSpec) -> None:
        self._head_dim = spec.head_dim
        self._scale = spec.head_dim**-0.5
        self._sliding_windows = spec.sliding_windows

    @staticmethod
    def supports(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def graph_refusal(self, block_size: int) -> str | None:
        """The reference, which serves what triton does not, reads lengths on the host."""
        return gpu_geometry_refusal(self._head_dim, block_size)

    def plan(self, batch: ForwardBatch) -> PagedStep:
        return PagedStep(batch, self._scale, self._sliding_windows)
