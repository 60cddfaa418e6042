"""Attention backends in order of preference, filled by plain imports."""

# isort: off
from slipstream.nn.attention import split_kv  # noqa: F401  (registers itself, first)
from slipstream.nn.attention import cpu  # noqa: F401
from slipstream.nn.attention import paged  # noqa: F401
from slipstream.nn.attention.invariant import INVARIANT  # last: chosen in deterministic mode only

# isort: on
from slipstream.nn.attention.backend import (
    ATTENTION_BACKENDS,
    AttentionBackend,
    LayerAttention,
    LayerCache,
    QKRope,
    StepAttention,
)

__all__ = [
    "ATTENTION_BACKENDS",
    "INVARIANT",
    "AttentionBackend",
    "LayerAttention",
    "LayerCache",
    "QKRope",
    "StepAttention",
]
