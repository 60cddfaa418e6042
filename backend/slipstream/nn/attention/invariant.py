"""The attention backend of deterministic mode: one op for every row, whose result no other row of the step changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention.backend import LayerAttention, latent_refusal
from slipstream.nn.attention.split_step import Rows, last_metadata, slots_of, store_heads, trees_and_chains
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_types import gpu_geometry_refusal
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class InvariantAttention:
    spec: DecoderSpec

    @staticmethod
    def supports(
        spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        """Blocks of 64 tokens are refused nowhere; whether the configured ones are served is the runtime's to check."""
        if latent_refusal(spec) is not None or device.type == "cpu":
            return latent_refusal(spec)
        return gpu_geometry_refusal(spec, 64, kv_dtype)

    def graph_refusal(self, block_size: int, has_trees: bool = False) -> str | None:
        return gpu_geometry_refusal(self.spec, block_size)

    def plan(self, batch: ForwardBatch) -> InvariantStep:
        return InvariantStep(batch, slots_of(batch), trees_and_chains(batch))


@dataclass(frozen=True)
class InvariantStep:
    """parts: as trees_and_chains makes them; the op is called for each apart."""

    batch: ForwardBatch
    slots: ops.TokenSlots
    parts: tuple[Rows, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        q = store_heads(self.slots, q, k, v, layer, cache)
        out = torch.empty_like(q)
        for rows in self.parts:
            ops.invariant_attention(q[rows.tokens], cache, rows.metadata, layer.options, out=out[rows.tokens])
        return out

    def forward_last(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        q = store_heads(self.slots, q, k, v, layer, cache)[self.batch.logits_indices]
        return ops.invariant_attention(q, cache, last_metadata(self.batch), layer.options) if q.shape[0] else q
