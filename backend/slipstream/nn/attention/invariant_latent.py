"""Latent attention (MLA) of deterministic mode: every row absorbed, by ops whose result no other row changes.

Un-absorbed, as latent.py computes long prompts, a row would be another sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention.backend import LatentLayer
from slipstream.nn.attention.latent import LatentBackend, step_latents
from slipstream.nn.attention.split_step import Rows, last_metadata, slots_of, trees_and_chains
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_types import gpu_geometry_refusal
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class InvariantLatent:
    spec: DecoderSpec

    @staticmethod
    def supports(
        spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        return LatentBackend.supports(spec, device, dtype, kv_dtype)

    def graph_refusal(self, block_size: int, has_trees: bool = False) -> str | None:
        return gpu_geometry_refusal(self.spec, block_size)

    def plan(self, batch: ForwardBatch) -> InvariantLatentStep:
        return InvariantLatentStep(batch, slots_of(batch), trees_and_chains(batch))


@dataclass(frozen=True)
class InvariantLatentStep:
    """parts: as trees_and_chains makes them; the op is called for each apart."""

    batch: ForwardBatch
    slots: ops.TokenSlots
    parts: tuple[Rows, ...]

    def forward(self, q: Tensor, latent: Tensor, layer: LatentLayer, cache: ops.LatentCache) -> Tensor:
        absorbed = _absorbed(q, layer, cache)
        q_rope, q_out = q[..., layer.nope_dim :], absorbed[..., cache.rank :]
        ops.write_latent(q_rope, step_latents(self.slots, latent, layer), cache, q_out)
        latents = absorbed.new_empty(*absorbed.shape[:2], cache.rank)
        for rows in self.parts:
            own, out = absorbed[rows.tokens], latents[rows.tokens]
            ops.invariant_latent_attention(own, cache, rows.metadata, scale=layer.scale, out=out)
        return _values(latents, layer)

    def forward_last(self, q: Tensor, latent: Tensor, layer: LatentLayer, cache: ops.LatentCache) -> Tensor:
        rotated = q[..., layer.nope_dim :]
        ops.write_latent(rotated, step_latents(self.slots, latent, layer), cache, rotated)
        wanted = self.batch.logits_indices
        absorbed = _absorbed(q[wanted], layer, cache)
        absorbed[..., cache.rank :] = rotated[wanted]
        latents = absorbed.new_empty(*absorbed.shape[:2], cache.rank)
        if len(latents):
            metadata = last_metadata(self.batch)
            ops.invariant_latent_attention(absorbed, cache, metadata, scale=layer.scale, out=latents)
        return _values(latents, layer)


def _absorbed(q: Tensor, layer: LatentLayer, cache: ops.LatentCache) -> Tensor:
    """Queries in the space of cache rows, [T, num_q_heads, rank + rope_dim], without their rotated part."""
    absorbed = q.new_empty(*q.shape[:2], cache.rank + cache.rope_dim)
    keys = layer.kv_b[:, : layer.nope_dim].transpose(1, 2)
    ops.invariant_head_mm(q[..., : layer.nope_dim], keys, absorbed[..., : cache.rank])
    return absorbed


def _values(latents: Tensor, layer: LatentLayer) -> Tensor:
    """Each head's values of what it attended to, [T, num_q_heads, value_dim]."""
    values = layer.kv_b[:, layer.nope_dim :]
    return ops.invariant_head_mm(latents, values, latents.new_empty(*latents.shape[:2], values.shape[1]))
