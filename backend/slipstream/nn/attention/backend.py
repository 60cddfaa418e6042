"""AttentionBackend: how a step's queries attend to the paged cache. Chosen once per model, planned once per step."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.registry import Registry
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.spec import DecoderSpec

LayerCache = tuple[Tensor, Tensor]  # key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim]


class StepAttention(Protocol):
    """The attention of one step; what all layers share was computed when it was planned."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layer: int) -> Tensor:
        """Store this step's keys and values, then attend. q: [T, num_q_heads, head_dim]; k, v: [T, num_kv_heads, …].

        Returns [T, num_q_heads, head_dim], contiguous. The inputs may be strided slices of one projection.
        """
        ...


class AttentionBackend(Protocol):
    def plan(self, batch: ForwardBatch) -> StepAttention:
        """Once per step, before the first layer."""
        ...

    def graph_refusal(self, block_size: int) -> str | None:
        """A reason why decode steps cannot be captured as CUDA graphs, or None."""
        ...


class AttentionBackendType(Protocol):
    """The class of a backend, as it stands in the registry."""

    def __call__(self, spec: DecoderSpec) -> AttentionBackend: ...

    def supports(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """A reason against serving this model there, or None."""
        ...


ATTENTION_BACKENDS: Registry[AttentionBackendType] = Registry("attention_backend")
