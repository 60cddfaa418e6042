"""Runs all layers of a small decode step in one kernel (ops.decode_layers), instead of the decoder's loop.

Engine thread. Uses the decoder's own weights, norms, caches and rotary table, for steps of one token per request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.layer_spec import DenseSpec
from slipstream.nn.linear import Linear
from slipstream.nn.mlp import MLP
from slipstream.nn.self_attention import SelfAttention
from slipstream.nn.spec import DecoderSpec

if TYPE_CHECKING:
    from slipstream.nn.decoder import DecoderLayer

logger = logging.getLogger(__name__)
GROUP = 128  # group size of 4-bit weights


class StackedLayers:
    """layers: the decoder's. The stack is built with the first step's caches, and rebuilt if the caches change."""

    def __init__(self, spec: DecoderSpec, layers: Sequence[DecoderLayer]) -> None:
        self._spec, self._layers = spec, layers
        self._stack: ops.LayerStack | None = None
        self._cache: LayerCache | None = None  # the first layer's, to detect changes
        self._max_tokens = 0

    def serves(self, batch: ForwardBatch, kv_caches: Sequence[LayerCache]) -> bool:
        """Whether `forward` supports this step: one token each of few requests, in a model that the kernel supports."""
        num_tokens = batch.token_ids.shape[0]
        is_decode = batch.max_query_len == 1 and batch.num_decode_tokens == num_tokens == batch.seq_lens.shape[0]
        if not is_decode or batch.tree_mask is not None:
            return False
        if self._cache is not kv_caches[0]:
            self._cache = kv_caches[0]
            refusal = self._prepare(kv_caches)
            logger.info("layers in one launch: %s", refusal or f"decodes of up to {self._max_tokens} requests")
        return num_tokens <= self._max_tokens

    def forget_caches(self) -> None:
        self._stack, self._cache, self._max_tokens = None, None, 0

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """hidden: [T, hidden_size] embeddings -> the residual stream after the last layer."""
        assert self._stack is not None
        rows = ops.StackRows(batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_tables)
        return ops.decode_layers(hidden, self._stack, rows, backend="cuda")

    def _prepare(self, kv_caches: Sequence[LayerCache]) -> str | None:
        self._stack, self._max_tokens = None, 0
        stack = _stack_of(self._spec, self._layers, kv_caches)
        if isinstance(stack, str):
            return stack
        reason = ops.decode_layers_refusal(stack)
        if reason is not None:
            return reason
        self._stack, self._max_tokens = stack, ops.max_stacked_tokens(stack)
        return None if self._max_tokens else "kernel by kernel is faster with these weights"


def _stack_of(
    spec: DecoderSpec, layers: Sequence[DecoderLayer], kv_caches: Sequence[LayerCache]
) -> ops.LayerStack | str:
    """The layers in the form of the op, or the reason why they are not supported."""
    reason = spec_refusal(spec)
    if reason is not None:
        return reason
    stacked = []
    for layer, cache in zip(layers, kv_caches):
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, MLP) and layer.input_norm is not None and layer.post_attention_norm is not None
        weights = [stack_weight(linear) for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
        reason = next((weight for weight in weights if isinstance(weight, str)), None)
        if reason is not None:
            return reason
        qkv, o, gate_up, down = weights
        norms = layer.input_norm.weight, layer.post_attention_norm.weight
        stacked.append(ops.StackLayer(qkv, o, gate_up, down, *norms, cache))  # type: ignore[arg-type]
    heads, first = spec.layers[0].attention, layers[0].attention
    assert isinstance(first, SelfAttention) and first.options.qk_rope.rope is not None
    rope = first.options.qk_rope.rope
    return ops.LayerStack(
        tuple(stacked), heads.num_q_heads, heads.num_kv_heads, heads.head_dim, rope, spec.norm_eps, heads.score_scale
    )


def spec_refusal(spec: DecoderSpec) -> str | None:
    """Why the op, which supports one kind of layer, cannot run this model, or None."""
    layer = spec.layers[0]
    if any(other != layer for other in spec.layers):
        return "layers differ from each other"
    attention, mlp = layer.attention, layer.mlp
    if attention.latent is not None:
        return "attention is latent"
    if not isinstance(mlp, DenseSpec):
        return "the MLP has experts"
    if attention.qk_norm or attention.sliding_window is not None:
        return "heads are normalised, or see a window"
    if attention.soft_cap is not None or attention.sinks:
        return "scores are capped, or have sinks"
    if attention.alibi_slopes or attention.rope is None:
        return "positions enter otherwise than by rotation"
    if attention.rope.is_interleaved or attention.rope.rotary_dim != attention.head_dim:
        return "heads are rotated in part, or in neighbouring pairs"
    kind = mlp.activation, layer.norms, layer.residual_scale
    return None if kind == ("silu", "pre", 1.0) else "the MLP, the norms or the residual stream are of another kind"


def stack_weight(linear: Linear) -> ops.StackWeight | str:
    """A layer's weight in the form of the op, or the reason why it is not supported."""
    weights: Mapping[str, Tensor] = linear.weights
    if weights.get("bias") is not None or "order" in weights:
        return "a product has a bias, or an order of its input features"
    if "packed" in weights and "scales" in weights:
        words, features = weights["scales"], linear.spec.in_features
        if weights["packed"].dtype == torch.uint8 or words.dim() != 4 or words.shape[1:4:2] != (features // GROUP, 1):
            return f"4-bit weights are not in groups of {GROUP}, or in an order for FP8 rows"
        return ops.int4_weight(weights["packed"], words, weights.get("zeros"), GROUP, features)
    if "weight" in weights and weights.get("scale") is not None and weights["scale"].dim() == 1:
        return ops.ScaledRows(weights["weight"], weights["scale"])
    return weights["weight"] if "weight" in weights and "scale" not in weights else "weights of another format"
