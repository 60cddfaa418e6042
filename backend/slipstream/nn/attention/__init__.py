"""Attention backends, registered in order of preference."""

from slipstream.nn.attention.backend import (
    ATTENTION_BACKENDS,
    AttentionBackend,
    AttentionBackendType,
    GroupedStep,
    LatentLayer,
    LatentStep,
    LayerAttention,
    StepAttention,
)
from slipstream.nn.attention.cpu import CpuAttention
from slipstream.nn.attention.invariant import InvariantAttention
from slipstream.nn.attention.invariant_latent import InvariantLatent
from slipstream.nn.attention.latent import LatentBackend
from slipstream.nn.attention.paged import PagedAttention
from slipstream.nn.attention.split_kv import SplitKVAttention, SplitKVFp8Attention

INVARIANT, INVARIANT_LATENT = "invariant", "invariant_latent"

ATTENTION_BACKENDS.register("split_kv_fp8")(SplitKVFp8Attention)
ATTENTION_BACKENDS.register("split_kv")(SplitKVAttention)
ATTENTION_BACKENDS.register("cpu")(CpuAttention)
ATTENTION_BACKENDS.register("paged")(PagedAttention)
ATTENTION_BACKENDS.register("latent")(LatentBackend)
# last: chosen in deterministic mode only
ATTENTION_BACKENDS.register(INVARIANT)(InvariantAttention)
ATTENTION_BACKENDS.register(INVARIANT_LATENT)(InvariantLatent)

__all__ = [
    "ATTENTION_BACKENDS",
    "INVARIANT",
    "INVARIANT_LATENT",
    "AttentionBackend",
    "AttentionBackendType",
    "GroupedStep",
    "LatentLayer",
    "LatentStep",
    "LayerAttention",
    "SplitKVFp8Attention",
    "StepAttention",
]
