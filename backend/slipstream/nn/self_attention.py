"""A layer's attention block: merged projection, the heads' norms and rotation, paged attention, output projection."""

from __future__ import annotations

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention import LayerCache, QKRope, StepAttention
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.linear import Linear
from slipstream.nn.norm import RMSNorm
from slipstream.nn.quant.activation_quant import Activation
from slipstream.nn.spec import DecoderSpec


class SelfAttention:
    """cos_sin: the model's table of nn/rotary.py, shared by all layers."""

    def __init__(self, spec: DecoderSpec, layer: int, cos_sin: Tensor, context: LayerContext) -> None:
        self.layer = layer
        self.head_dim = spec.head_dim
        self.head_counts = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.num_kv_heads = spec.num_kv_heads
        self._device = context.device
        self.kv_scales: tuple[Tensor, Tensor] | None = None  # of an FP8 cache: k's and v's, [num_kv_heads] fp32
        self.qkv = Linear(spec.qkv, context)
        self.o = Linear(spec.o, context)
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        if spec.qk_norm:
            q_norm, k_norm = (RMSNorm(spec.head_dim, spec.norm_eps, context) for _ in "qk")
            self.head_norms = (q_norm, k_norm)
        self.turn = QKRope(ops.Rope(cos_sin), _head_norms(self.head_norms))

    def __call__(self, hidden: Activation, step: StepAttention, cache: LayerCache) -> Tensor:
        """hidden: T rows quantised as qkv wants them -> [T, hidden_size]. The cache gains their keys and values."""
        return self.o(step.forward(*self._heads(hidden), self.turn, cache, self.layer).flatten(1))

    def attend_last(self, hidden: Activation, step: StepAttention, cache: LayerCache) -> Tensor:
        """What `o` reads, of the rows of which logits are wanted alone; the cache gains the keys and values of all."""
        return step.forward_last(*self._heads(hidden), self.turn, cache, self.layer).flatten(1)

    def _heads(self, hidden: Activation) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.apply(hidden).unflatten(1, (-1, self.head_dim)).split(self.head_counts, dim=1)
        return q, k, v

    def load_kv_scale(self, part: str, tensor: Tensor) -> None:
        """Take a scale of all heads, or one of each, for "k", "v" or both, "kv".

        A scale of 0 or less stands for none. Raises ValueError for one that is no number.
        """
        if not tensor.isfinite().all():
            raise ValueError("is not finite")
        if self.kv_scales is None:
            ones = torch.ones(2, self.num_kv_heads, device=self._device)
            self.kv_scales = (ones[0], ones[1])
        for name, scale in zip("kv", self.kv_scales):
            if name in part:
                scale.copy_(torch.where(tensor > 0, tensor, 1.0).reshape(-1))


def _head_norms(norms: tuple[RMSNorm, RMSNorm] | None) -> ops.HeadNorms | None:
    if norms is None:
        return None
    q_norm, k_norm = norms
    return ops.HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)
