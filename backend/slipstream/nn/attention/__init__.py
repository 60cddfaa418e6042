"""Attention backends in order of preference, filled by plain imports."""

from slipstream.nn.attention import paged  # noqa: F401  (registers itself)
from slipstream.nn.attention.backend import ATTENTION_BACKENDS, AttentionBackend, LayerCache, StepAttention

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "LayerCache", "StepAttention"]
