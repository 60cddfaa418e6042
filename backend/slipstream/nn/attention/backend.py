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

LayerCache = ops.KvCache  # keys and values of one layer, with their scales: one shape for every type


@dataclass(frozen=True)
class QKRope:
    """What a layer does to its query and key heads before they meet: an optional norm, then the rotation, if any."""

    rope: ops.Rope | None
    norms: ops.HeadNorms | None = None


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends, as the ops take it: see AttentionSpec. alibi_slopes, sinks: [num_q_heads] fp32."""

    qk_rope: QKRope
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


class StepAttention(Protocol):
    """The attention of one step; what all layers share was computed when it was planned."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: LayerCache) -> Tensor:
        """Normalise and rotate q and k, store this step's keys and values, then attend.

        q: [T, num_q_heads, head_dim], k, v: [T, num_kv_heads, head_dim], as projected: strided slices will do.
        Returns [T, num_q_heads, head_dim], contiguous.
        """
        ...

    def forward_last(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, cache: LayerCache) -> Tensor:
        """As `forward`, but only the rows of which logits are wanted attend; each must be the last of its request.

        Returns [S, num_q_heads, head_dim], contiguous.
        """
        ...


class AttentionBackend(Protocol):
    @property
    def stacks_layers(self) -> bool:
        """Whether steps of few decodes run all layers in one launch, where that serves."""
        ...

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


ATTENTION_BACKENDS: Registry[AttentionBackendType] = Registry("attention_backend")
