"""A layer's latent attention (MLA): projections to queries and latents, attention over latents, output projection.

Queries and latents come from one product; keys and values of each head, and the reverse, are products with `kv_b` that
the backend makes as it attends (nn/attention/latent.py). Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from slipstream_kernels import ops
from slipstream_kernels.ops import Activation, ActivationQuant
from torch import Tensor

from slipstream.nn.attention import LatentLayer, LatentStep, StepAttention
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import AttentionSpec, LinearSpec
from slipstream.nn.linear import Linear
from slipstream.nn.norm import RMSNorm
from slipstream.nn.quant.method import READERS
from slipstream.nn.rotary import RopeTables
from slipstream.nn.vector import Vector
from slipstream.nn.weight_slot import WeightSlot

RANK_NORM_EPS = 1e-6  # of the norms of queries' and keys' ranks: a constant of the family, not the model's rms_norm_eps
_META = torch.device("meta")


class UpProjection:
    """The matrix from latents to keys and values of all heads, in the model's dtype however the checkpoint stores it.

    It is multiplied from both sides, which no quantised product serves. One that is stored quantised is loaded as any
    other linear layer and multiplied by the identity, layer by layer. A stored scale of its inputs has no use.
    """

    def __init__(self, spec: LinearSpec, context: LayerContext) -> None:
        stored = context.method_of(spec).stored
        self._whole, self._context = spec, context if stored is not None else context.of_plain
        self._unused = ""  # suffix of a stored tensor
        if stored is not None and stored.static_inputs:
            self._unused = stored.input_scale_name
            self._context = replace(context, method=READERS[stored.method](replace(stored, static_inputs=False)))
        self.spec = spec.of_rank(context.parallel)
        shape = (self.spec.out_features, self.spec.in_features)
        self.matrix = torch.empty(shape, device=context.device, dtype=context.dtype)
        self._loading: Linear | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        return {"weight": self.matrix}

    def slots(self) -> Iterator[tuple[str, str, WeightSlot]]:
        """As Linear.slots."""
        shapes = Linear(self._whole, replace(self._context, device=_META, stands_for=self._context.computes_on))
        for part, suffix, slot in shapes.slots():
            yield part, suffix, replace(slot, load=partial(self._load, suffix))
            if self._unused and suffix == "weight":
                yield part, self._unused, WeightSlot((1,), lambda _: None, is_optional=True)

    def _load(self, suffix: str, tensor: Tensor) -> None:
        linear = self._loading = self._loading or Linear(self._whole, self._context)
        next(slot for _, own, slot in linear.slots() if own == suffix).load(tensor)
        if linear.is_loaded:
            identity = torch.eye(self.spec.in_features, device=self.matrix.device, dtype=self.matrix.dtype)
            self.matrix.copy_(linear(identity).t())
            self._loading = None


class LatentAttention:
    """norm_eps: the model's, which none of these norms has."""

    def __init__(self, spec: AttentionSpec, norm_eps: float, ropes: RopeTables, context: LayerContext) -> None:
        assert spec.latent is not None and spec.kv_b is not None
        self.spec, self._latent = spec, spec.latent
        self.qkv = Linear(spec.qkv, context)
        self.q_b = None if spec.q_b is None else Linear(spec.q_b, context)
        self.kv_b = UpProjection(spec.kv_b, context)
        self.o = Linear(spec.o, context)
        self.norms = tuple(RMSNorm(size, RANK_NORM_EPS, context) for size in spec.norm_sizes)  # queries', latents'
        self.kv_scales: dict[str, Tensor] = {}  # FP8 rows have their own
        rope = ropes.of(spec.rope)
        assert rope is not None
        latent_norm, heads = self.norms[-1], self.kv_b.matrix.unflatten(0, (-1, spec.kv_b.unit))
        self.layer = LatentLayer(
            rope, spec.score_scale, latent_norm.weight, latent_norm.eps, heads, self._latent.nope_dim
        )

    @property
    def input_quant(self) -> ActivationQuant[Activation]:
        return self.qkv.activation_quant

    def __call__(self, hidden: Activation, step: StepAttention, cache: LayerCache) -> Tensor:
        """hidden: T rows quantised as qkv wants them -> [T, hidden_size]. The cache gains their latents."""
        latent_step, own = cast("LatentStep", step), cast("ops.LatentCache", cache)
        return self.o(latent_step.forward(*self._projected(hidden), self.layer, own).flatten(1))

    def attend_last(self, hidden: Activation, step: StepAttention, cache: LayerCache) -> Tensor:
        """The input of `o` for the rows whose logits are needed; writes latents of all rows."""
        latent_step, own = cast("LatentStep", step), cast("ops.LatentCache", cache)
        return latent_step.forward_last(*self._projected(hidden), self.layer, own).flatten(1)

    def _projected(self, hidden: Activation) -> tuple[Tensor, Tensor]:
        """Query heads [T, num_q_heads, head_dim], and latents with keys [T, rank + rope_dim]."""
        projected = self.qkv.apply(hidden)
        num_latent = self._latent.rank + self._latent.rope_dim
        q, latent = projected.split([projected.shape[1] - num_latent, num_latent], dim=1)
        if self.q_b is not None:
            normed, _ = self.norms[0].add(q, None, self.q_b.activation_quant)
            q = self.q_b.apply(normed)
        return q.unflatten(1, (-1, self.spec.head_dim)), latent

    def linears(self) -> tuple[Linear | UpProjection, ...]:
        return (self.qkv, *(() if self.q_b is None else (self.q_b,)), self.kv_b, self.o)

    def named_norms(self) -> Iterator[tuple[str, RMSNorm]]:
        return zip(("q_a_norm", "kv_a_norm")[-len(self.norms) :], self.norms)

    def vectors(self) -> dict[tuple[str, str], Vector]:
        return {}
