"""Attention backends in order of preference, filled by plain imports."""

# isort: off
from slipstream.nn.attention import split_kv  # noqa: F401  (registers itself, first)
from slipstream.nn.attention import paged  # noqa: F401

# isort: on
from slipstream.nn.attention.backend import ATTENTION_BACKENDS, AttentionBackend, HeadTurn, LayerCache, StepAttention

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "HeadTurn", "LayerCache", "StepAttention"]
