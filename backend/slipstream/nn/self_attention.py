"""A layer's attention block: merged projection, optional head norms, rotation, paged attention, output projection."""

from __future__ import annotations

from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention import LayerCache, StepAttention
from slipstream.nn.linear import Linear
from slipstream.nn.norm import RMSNorm
from slipstream.nn.placement import Placement
from slipstream.nn.quant.input_form import Activation
from slipstream.nn.spec import DecoderSpec


class SelfAttention:
    """cos_sin: the model's table of nn/rotary.py, shared by all layers."""

    def __init__(self, spec: DecoderSpec, layer: int, cos_sin: Tensor, placement: Placement) -> None:
        self.layer = layer
        self.cos_sin = cos_sin
        self.rotary_dim = spec.rope.rotary_dim
        self.head_dim = spec.head_dim
        self.head_counts = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.qkv = Linear(spec.qkv, placement)
        self.o = Linear(spec.o, placement)
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        if spec.qk_norm:
            q_norm, k_norm = (RMSNorm(spec.head_dim, spec.norm_eps, placement) for _ in "qk")
            self.head_norms = (q_norm, k_norm)

    def __call__(self, hidden: Activation, positions: Tensor, step: StepAttention, cache: LayerCache) -> Tensor:
        """hidden: T rows in the input form of qkv -> [T, hidden_size]. The cache gains this step's keys and values."""
        num_tokens = positions.shape[0]
        q, k, v = self.qkv.apply(hidden).view(num_tokens, -1, self.head_dim).split(self.head_counts, dim=1)
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            q, k = q_norm(q), k_norm(k)
        ops.rope(q, k, positions, self.cos_sin, rotary_dim=self.rotary_dim)
        attended = step.forward(q, k, v, cache, self.layer)
        return self.o(attended.view(num_tokens, -1))
