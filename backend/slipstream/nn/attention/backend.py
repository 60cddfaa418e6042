"""AttentionBackend: how a step's queries attend to the paged cache. Chosen once per model, planned once per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.registry import Registry
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.spec import DecoderSpec


@dataclass(frozen=True)
class LayerAttention:
    """How a layer of grouped-query attention attends. Options of prompts in FP8 are set by key_means.py.

    query_scales: [num_positions] fp32, by which rotated queries are multiplied at last.
    """

    qk_rope: ops.QKRope
    options: ops.AttentionOptions
    query_scales: Tensor | None = None

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """q: [T, num_q_heads, head_dim], rotated, which is changed where there are scales."""
        if self.query_scales is None:
            return q
        return q.mul_(self.query_scales[positions].to(q.dtype)[:, None, None])


@dataclass(frozen=True)
class LatentLayer:
    """How a layer of latent attention attends. norm_weight: [rank], of its latents.

    kv_b: [num_q_heads, nope_dim + value_dim, rank]: each head's keys and values from a latent.
    """

    rope: ops.Rope
    scale: float
    norm_weight: Tensor
    norm_eps: float
    kv_b: Tensor
    nope_dim: int


class GroupedStep(Protocol):
    """The grouped-query attention of one step; what all layers share was computed when it was planned."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        """Normalise and rotate q and k, store this step's keys and values, then attend.

        q: [T, num_q_heads, head_dim], k, v: [T, num_kv_heads, head_dim], as projected: strided slices will do.
        Returns [T, num_q_heads, head_dim], contiguous.
        """
        ...

    def forward_last(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: ops.KvCache) -> Tensor:
        """As `forward`, but only the rows of which logits are wanted attend; each must be the last of its request.

        Returns [S, num_q_heads, head_dim], contiguous.
        """
        ...


class LatentStep(Protocol):
    """The latent attention of one step."""

    def forward(self, q: Tensor, latent: Tensor, layer: LatentLayer, cache: ops.LatentCache) -> Tensor:
        """Norm and store this step's latents, rotate keys and queries, then attend.

        q: [T, num_q_heads, head_dim], whose last features are overwritten by the rotated ones; latent: [T, rank +
        rope_dim], as projected. Returns [T, num_q_heads, value_dim], contiguous.
        """
        ...

    def forward_last(self, q: Tensor, latent: Tensor, layer: LatentLayer, cache: ops.LatentCache) -> Tensor:
        """As `forward`, for the rows of which logits are wanted; each must be the last of its request."""
        ...


StepAttention = GroupedStep | LatentStep  # as the backend of the layers' kind plans it


class AttentionBackend(Protocol):
    def plan(self, batch: ForwardBatch) -> StepAttention:
        """Once per step, before the first layer."""
        ...

    def graph_refusal(self, block_size: int, has_trees: bool = False) -> str | None:
        """A reason why decode steps, and trees of drafts, cannot be captured as CUDA graphs, or None."""
        ...


class AttentionBackendType(Protocol):
    """The class of a backend, as it stands in the registry."""

    def __call__(self, spec: DecoderSpec) -> AttentionBackend: ...

    def supports(
        self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        """A reason against serving this model there, or None. kv_dtype: of the cache, None is dtype."""
        ...


def latent_refusal(spec: DecoderSpec) -> str | None:
    """Why a backend of grouped-query attention cannot serve the model, or None."""
    return "knows no latent attention" if any(own.latent is not None for own in spec.attentions) else None


ATTENTION_BACKENDS: Registry[AttentionBackendType] = Registry("attention_backend")
