"""A layer's attention block: merged projection, the heads' norms and rotation, paged attention, output projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from slipstream_kernels import ops
from slipstream_kernels.ops import Activation, ActivationQuant
from torch import Tensor

from slipstream.nn.attention import GroupedStep, LayerAttention, StepAttention
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.linear import Linear
from slipstream.nn.lora import make_linear
from slipstream.nn.norm import RMSNorm, SharedRMSNorm
from slipstream.nn.rotary import RopeTables
from slipstream.nn.vector import Vector


class SelfAttention:
    """With several ranks each has some of the heads, and a part of every feature of the result, which is their sum."""

    def __init__(self, spec: AttentionSpec, norm_eps: float, ropes: RopeTables, context: LayerContext) -> None:
        self.spec = spec
        self.qkv = make_linear(spec.qkv, context)
        self.o = make_linear(spec.o, context)
        self.norms = _norms(spec, norm_eps, context)  # queries', keys'
        self.kv_scales: dict[str, Tensor] = {}  # by plane of an FP8 cache, [own kv heads] fp32, if stored
        own = spec.of_rank(context.parallel)
        q_heads, self._kv_heads = spec.heads_of(context.parallel)
        self.sinks = Vector(spec.num_q_heads, context, q_heads) if spec.sinks else None
        self.layer = _layer(own, self.norms, self.sinks, ropes, context)
        self._head_counts = (own.num_q_heads, own.num_kv_heads, own.num_kv_heads)
        self._device = context.device

    @property
    def input_quant(self) -> ActivationQuant[Activation]:
        return self.qkv.activation_quant

    def __call__(self, hidden: Activation, step: StepAttention, cache: LayerCache) -> Tensor:
        """hidden: T rows quantised as qkv wants them -> [T, hidden_size]. The cache gains their keys and values."""
        grouped, own = cast("GroupedStep", step), cast("ops.KvCache", cache)
        return self.o(grouped.forward(*self._heads(hidden), self.layer, own).flatten(1))

    def attend_last(self, hidden: Activation, step: StepAttention, cache: LayerCache) -> Tensor:
        """The input of `o` for the rows whose logits are needed; writes keys and values of all rows."""
        grouped, own = cast("GroupedStep", step), cast("ops.KvCache", cache)
        return grouped.forward_last(*self._heads(hidden), self.layer, own).flatten(1)

    def _heads(self, hidden: Activation) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.apply(hidden).unflatten(1, (-1, self.spec.head_dim)).split(self._head_counts, dim=1)
        if self.spec.qk_norm == "flat":
            q, k = (norm(heads.flatten(1)).view(heads.shape) for norm, heads in zip(self.norms, (q, k)))
        return q, k, v

    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o)

    def named_norms(self) -> Iterator[tuple[str, RMSNorm]]:
        return zip(("q_norm", "k_norm"), self.norms)

    def vectors(self) -> dict[tuple[str, str], Vector]:
        """By module and suffix."""
        return {} if self.sinks is None else {("sinks", "sinks"): self.sinks}

    def load_kv_scale(self, part: str, tensor: Tensor) -> None:
        """Load one scale for all heads, or one per head, of "k", "v" or both, "kv".

        A scale <= 0 means no scale. Raises ValueError for NaN or infinity.
        """
        if not tensor.isfinite().all():
            raise ValueError("is not finite")
        if not self.kv_scales:
            ones = torch.ones(2, self._head_counts[1], device=self._device)
            self.kv_scales = {"key_scale": ones[0], "value_scale": ones[1]}
        for name, scale in zip("kv", self.kv_scales.values()):
            if name in part:
                scales = torch.where(tensor > 0, tensor, 1.0).reshape(-1)
                scale.copy_(scales[self._kv_heads] if len(scales) == self.spec.num_kv_heads else scales)


def _norms(spec: AttentionSpec, norm_eps: float, context: LayerContext) -> tuple[RMSNorm, ...]:
    if spec.qk_norm == "flat" and context.parallel.size > 1:
        return tuple(SharedRMSNorm(size, spec.head_dim, norm_eps, context) for size in spec.norm_sizes)
    return tuple(RMSNorm(size, norm_eps, context) for size in spec.norm_sizes)


def _layer(
    spec: AttentionSpec,
    norms: tuple[RMSNorm, ...],
    sinks: Vector | None,
    ropes: RopeTables,
    context: LayerContext,
) -> LayerAttention:
    of_heads = None
    if spec.qk_norm in ("head", "rotated"):
        of_heads = ops.HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps, spec.qk_norm == "rotated")
    slopes = torch.tensor(spec.alibi_slopes, device=context.device) if spec.alibi_slopes else None
    options = ops.AttentionOptions(
        spec.score_scale, spec.sliding_window, spec.soft_cap, slopes, None if sinks is None else sinks.values
    )
    return LayerAttention(ops.QKRope(ropes.of(spec.rope), of_heads), options, ropes.query_scales(spec.rope))
