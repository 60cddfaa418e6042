"""LayerSpec: one layer of a decoder as data, its attention, its MLP and where its norms stand, with its linear layers.

Plain data: which of it the code serves is said in nn/spec_refusals.py, and how, in the modules that are built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from slipstream_kernels.ops import LatentCache, RoutingRule
from torch import Tensor

from slipstream.nn.kv_layout import KVLayout, LayerCache, key_value_cache, key_value_layout, latent_layout
from slipstream.nn.parallel import Parallel
from slipstream.nn.rope_spec import RopeSpec

SOFTMAX = RoutingRule()  # renormalised
PADDING = ""  # a part of zeros, which no checkpoint stores


@dataclass(frozen=True)
class LinearSpec:
    """One matrix product of the decoder: parts that share an input are merged into it, in order.

    parts: (name, rows) of each; a part is what a checkpoint stores under a name of its own. num_experts: 0, or as many
    products of one shape, one below the other, of which an input takes some; parts are "name.expert" then.
    shard: how ranks share it: "column" (each has some output features of every part), "row" (some input features),
    "vocabulary" (output features, the last rank fewer, then zeros as a part PADDING) or "none". unit: features that
    stay together, those of a head.
    in_blocks: features are shared by blocks, of which ranks may have different numbers, and not by units.
    columns: of a rank's "row" shard, its first input feature and the number of all. whole: parts of a "column" shard
    that every rank has whole; repeated: those of which several ranks have the same unit, if there are fewer than ranks.
    """

    in_features: int
    parts: tuple[tuple[str, int], ...]
    bias: bool = False
    num_experts: int = 0
    shard: str = "none"
    unit: int = 1
    columns: tuple[int, int] | None = None
    whole: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    in_blocks: bool = False

    @property
    def out_features(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def title(self) -> str:
        """Its parts' names for a message, those of experts once for all."""
        names = ", ".join(dict.fromkeys(name.partition(".")[0] for name, _ in self.parts))
        return f"{names} of {self.num_experts} experts" if self.num_experts else names

    @property
    def num_weights(self) -> int:
        """Without biases."""
        return self.out_features * self.in_features

    @property
    def num_parameters(self) -> int:
        return self.num_weights + self.out_features * self.bias

    def rows_of(self, part: str, rows: int, parallel: Parallel) -> slice:
        """Output features of a part that a rank has."""
        if self.shard == "vocabulary":
            return parallel.vocabulary(rows)
        is_whole = part in self.whole or (self.num_experts and parallel.splits_experts)
        return self._range(part, rows, parallel) if self.shard == "column" and not is_whole else slice(0, rows)

    def _range(self, part: str, size: int, parallel: Parallel) -> slice:
        """A rank's features of a part."""
        if self.in_blocks:
            return parallel.blocks_of(part, size)
        range_of = parallel.repeated_range_of if part in self.repeated else parallel.range_of
        return range_of(part, size, self.unit)

    def of_rank(self, parallel: Parallel) -> LinearSpec:
        """What a rank has of it; the bias of a "row" shard is added once, by the first."""
        if self.shard == "vocabulary":
            ((name, size),), own = self.parts, parallel.vocabulary(self.out_features)
            num_rows = own.stop - own.start
            return replace(self, parts=((name, num_rows), (PADDING, parallel.vocabulary_width(size) - num_rows)))
        if parallel.size == 1 or self.shard == "none":
            return self
        if self.num_experts and parallel.splits_experts:
            own, num_parts = parallel.experts(self.num_experts), len(self.parts) // self.num_experts
            parts = self.parts[own.start * num_parts : own.stop * num_parts]
            return replace(self, parts=parts, num_experts=own.stop - own.start)
        if self.shard == "row":
            own = self._range(self.parts[0][0], self.in_features, parallel)
            columns = (own.start, self.in_features)
            bias = self.bias and parallel.rank == 0
            return replace(self, in_features=own.stop - own.start, columns=columns, bias=bias)
        ranges = [(name, self.rows_of(name, rows, parallel)) for name, rows in self.parts]
        return replace(self, parts=tuple((name, own.stop - own.start) for name, own in ranges))


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (MLA): keys and values of all heads come from one latent of a token.

    rank: its features, normed, from which each head's keys (nope_dim) and values (value_dim) are projected.
    rope_dim: features of a key that are rotated, and that all heads share. q_rank: features that queries are projected
    from, normed; 0: from the token itself. Source: DeepSeek-V2, arXiv:2405.04434.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Attention over num_inputs features of a token, whose result has hidden_size features: of grouped queries, or with
    `latent` of kind "mla". Then num_kv_heads is 1, and head_dim what is multiplied of a query head and its key.

    scale: of q·k; None is 1 / sqrt(head_dim). sliding_window: the number of latest tokens that a token sees (itself
    included); None = all. soft_cap: scores become soft_cap · tanh(score / soft_cap). alibi_slopes: one a query head,
    times the distance of the key, added to scores. rope: None = positions are not rotated in.
    qk_norm: RMSNorm of queries and keys before the rotation, of each "head" or of all heads together ("flat"), or of
    each head after it ("rotated").
    sinks: a logit a head that takes part in the softmax without a value. output_gate: the result is multiplied by the
    sigmoid of a gate that is projected beside each query head.
    """

    hidden_size: int
    num_inputs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] = ()
    qk_norm: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    output_gate: bool = False
    latent: LatentSpec | None = None

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def qkv(self) -> LinearSpec:
        """The first product; of latent attention what gives the latents, and queries or what they come from."""
        if self.latent is not None:
            return self._latent_qkv(self.latent)
        kv = self.num_kv_heads * self.head_dim
        parts = (("q", self.num_q_heads * self.head_dim), ("k", kv), ("v", kv))
        repeated = ("k", "v")
        return LinearSpec(self.num_inputs, parts, self.qkv_bias, shard="column", unit=self.head_dim, repeated=repeated)

    def _latent_qkv(self, latent: LatentSpec) -> LinearSpec:
        kv_a = ("kv_a", latent.rank + latent.rope_dim)
        if latent.q_rank:
            return LinearSpec(self.num_inputs, (("q_a", latent.q_rank), kv_a))
        parts = (("q", self.num_q_heads * self.head_dim), kv_a)
        return LinearSpec(self.num_inputs, parts, shard="column", unit=self.head_dim, whole=("kv_a",))

    @property
    def q_b(self) -> LinearSpec | None:
        """Queries of latent attention from q_rank features."""
        if self.latent is None or not self.latent.q_rank:
            return None
        parts = (("q_b", self.num_q_heads * self.head_dim),)
        return LinearSpec(self.latent.q_rank, parts, shard="column", unit=self.head_dim)

    @property
    def kv_b(self) -> LinearSpec | None:
        """Keys and values of each head from a latent. Held in the model's dtype by every quantisation method."""
        if self.latent is None:
            return None
        unit = self.latent.nope_dim + self.latent.value_dim
        return LinearSpec(self.latent.rank, (("kv_b", self.num_q_heads * unit),), shard="column", unit=unit)

    @property
    def o(self) -> LinearSpec:
        parts, unit = (("o", self.hidden_size),), self.latent.value_dim if self.latent is not None else self.head_dim
        return LinearSpec(self.num_q_heads * unit, parts, self.o_bias, shard="row", unit=unit)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The products that a quantisation method holds."""
        return (self.qkv, *(() if self.q_b is None else (self.q_b,)), self.o)

    def heads_of(self, parallel: Parallel) -> tuple[slice, slice]:
        """The query heads and the heads of keys that a rank has."""
        q = parallel.range_of("q", self.num_q_heads * self.head_dim, self.head_dim)
        kv = parallel.repeated_range_of("k", self.num_kv_heads * self.head_dim, self.head_dim)
        size = self.head_dim
        return slice(q.start // size, q.stop // size), slice(kv.start // size, kv.stop // size)

    def of_rank(self, parallel: Parallel) -> AttentionSpec:
        """The heads that a rank computes and caches; a head of keys is every rank's that has queries of it."""
        if parallel.size == 1:
            return self
        q, kv = self.heads_of(parallel)
        slopes = self.alibi_slopes[q]
        return replace(self, num_q_heads=q.stop - q.start, num_kv_heads=kv.stop - kv.start, alibi_slopes=slopes)

    @property
    def norm_sizes(self) -> tuple[int, ...]:
        """Features of the norms of queries and of keys, none without; of latent attention those of its ranks."""
        if self.latent is not None:
            return tuple(size for size in (self.latent.q_rank, self.latent.rank) if size)
        heads = {"": (), "head": (1, 1), "rotated": (1, 1), "flat": (self.num_q_heads, self.num_kv_heads)}[self.qk_norm]
        return tuple(count * self.head_dim for count in heads)

    @property
    def num_parameters(self) -> int:
        vectors = sum(self.norm_sizes) + (self.num_q_heads if self.sinks else 0)
        linears = self.linears if self.kv_b is None else (*self.linears, self.kv_b)
        return vectors + sum(linear.num_parameters for linear in linears)

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """What a token has in the layer's cache. dtype: as ops.KvCache names types."""
        if self.latent is not None:
            return latent_layout(self.latent.rank, self.latent.rope_dim, dtype)
        return key_value_layout(self.num_kv_heads, self.head_dim, dtype)

    def kv_cache(self, planes: Mapping[str, Tensor]) -> LayerCache:
        """The cache of planes of that layout; per-head scales may replace per-token scales."""
        if self.latent is not None:
            return LatentCache(planes["latent"], self.latent.rank, self.latent.rope_dim)
        return key_value_cache(planes)


@dataclass(frozen=True)
class DenseSpec:
    """A gated MLP: down(activation(gate(x)) · up(x)). activation: silu or gelu_tanh.

    prefix: before the names of its parts, where a layer has a second one.
    """

    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    bias: bool = False
    prefix: str = ""

    @property
    def gate_up(self) -> LinearSpec:
        parts = tuple((f"{self.prefix}{name}", self.intermediate_size) for name in ("gate", "up"))
        return LinearSpec(self.hidden_size, parts, self.bias, shard="column", in_blocks=True)

    @property
    def down(self) -> LinearSpec:
        parts = ((f"{self.prefix}down", self.hidden_size),)
        return LinearSpec(self.intermediate_size, parts, self.bias, shard="row", in_blocks=True)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The products that a quantisation method holds."""
        return (self.gate_up, self.down)

    @property
    def num_parameters(self) -> int:
        return sum(linear.num_parameters for linear in self.linears)

    @property
    def width(self) -> int:
        """Features between gate_up and down of one token."""
        return self.intermediate_size


@dataclass(frozen=True)
class RouterSpec:
    """Which experts a token takes, and with what weights: see ops.RoutingRule.

    selection_bias: a stored bias of each expert that ranks, and does not weigh. logit_bias: the router's own.
    """

    num_experts_per_token: int
    rule: RoutingRule = SOFTMAX
    selection_bias: bool = False
    logit_bias: bool = False


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) · gate · sigmoid(alpha · gate), with gate at most limit and up within it: see ops.gate_experts."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertsSpec:
    """num_experts MLPs, of which each token takes some; intermediate_size: of one of them.

    bias: of every product of an expert. clamped: the activation, where it is not silu(gate) · up.
    shared: an MLP that every token takes beside them. shared_gate: its result is multiplied by the sigmoid of one
    number that is projected from the token.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    routing: RouterSpec
    shared: DenseSpec | None = None
    shared_gate: bool = False
    bias: bool = False
    clamped: ClampedSwiglu | None = None

    @property
    def router(self) -> LinearSpec:
        return LinearSpec(self.hidden_size, (("router", self.num_experts),), self.routing.logit_bias)

    @property
    def gate(self) -> LinearSpec:
        """The gate of the shared MLP."""
        return LinearSpec(self.hidden_size, (("shared_expert_gate", 1),))

    @property
    def gate_up(self) -> LinearSpec:
        return self._of_all(DenseSpec(self.hidden_size, self.intermediate_size, bias=self.bias).gate_up)

    @property
    def down(self) -> LinearSpec:
        return self._of_all(DenseSpec(self.hidden_size, self.intermediate_size, bias=self.bias).down)

    def _of_all(self, linear: LinearSpec) -> LinearSpec:
        parts = tuple((f"{name}.{expert}", rows) for expert in range(self.num_experts) for name, rows in linear.parts)
        return replace(linear, parts=parts, num_experts=self.num_experts)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The products that a quantisation method holds: neither the router nor the gate."""
        return (self.gate_up, self.down, *(() if self.shared is None else self.shared.linears))

    @property
    def num_parameters(self) -> int:
        unquantised = self.router.num_parameters + (self.gate.num_parameters if self.shared_gate else 0)
        unquantised += self.num_experts if self.routing.selection_bias else 0
        return unquantised + sum(linear.num_parameters for linear in self.linears)

    @property
    def width(self) -> int:
        """Features between gate_up and down of one token, in all of its MLPs."""
        shared = 0 if self.shared is None else self.shared.width
        return self.routing.num_experts_per_token * self.intermediate_size + shared


@dataclass(frozen=True)
class LayerSpec:
    """norms: "pre" (x + f(norm(x))), "post" (x + norm(f(x))) or "both", of attention and MLP each.

    residual_scale: times what attention and MLP add to the residual stream. plain: parts of its linear layers that the
    checkpoint stores unquantised, though others are quantised; "expert_gate" is that of all experts.
    """

    attention: AttentionSpec
    mlp: DenseSpec | ExpertsSpec
    norms: str = "pre"
    residual_scale: float = 1.0
    plain: frozenset[str] = frozenset()

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The products that a quantisation method holds."""
        return (*self.attention.linears, *self.mlp.linears)

    @property
    def num_parameters(self) -> int:
        norms = (4 if self.norms == "both" else 2) * self.attention.hidden_size
        return norms + self.attention.num_parameters + self.mlp.num_parameters
