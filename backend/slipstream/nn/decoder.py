"""The one decoder: embedding, layers of attention and MLP, final norm, logits. Built from a DecoderSpec.

Belongs to the engine thread; the caller holds torch.inference_mode. Knows tensors only: no requests, sampling,
scheduling or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from slipstream_kernels.ops import PLAIN, Activation, ActivationQuant
from torch import Tensor

from slipstream.nn.attention import AttentionBackend, StepAttention
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.embedding import Embedding, Head, LogitScale, TiedHead
from slipstream.nn.experts import Experts
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.latent_attention import LatentAttention, UpProjection
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import DenseSpec, LayerSpec
from slipstream.nn.linear import Linear
from slipstream.nn.lora import LoraLinear
from slipstream.nn.mlp import MLP
from slipstream.nn.norm import RMSNorm
from slipstream.nn.quant.invariant import is_unquantized
from slipstream.nn.rotary import RopeTables
from slipstream.nn.self_attention import SelfAttention
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names, stored_slots
from slipstream.nn.vector import Vector
from slipstream.nn.weight_slot import WeightSlot


class DecoderLayer:
    """One block. The residual stream is handed on beside the block's output, so that each norm adds them itself.

    input_norm, post_attention_norm: before attention and MLP; attention_output_norm, mlp_output_norm: of their results.
    """

    def __init__(self, spec: LayerSpec, norm_eps: float, ropes: RopeTables, context: LayerContext) -> None:
        self.spec = spec
        self._parallel = context.parallel
        context = replace(context, plain=spec.plain)
        size, is_before, is_after = spec.attention.hidden_size, spec.norms != "post", spec.norms != "pre"
        self.input_norm = RMSNorm(size, norm_eps, context) if is_before else None
        kind = SelfAttention if spec.attention.latent is None else LatentAttention
        self.attention: SelfAttention | LatentAttention = kind(spec.attention, norm_eps, ropes, context)
        self.attention_output_norm = RMSNorm(size, norm_eps, context) if is_after else None
        self.post_attention_norm = RMSNorm(size, norm_eps, context) if is_before else None
        mlp = spec.mlp
        self.mlp: MLP | Experts = MLP(mlp, context) if isinstance(mlp, DenseSpec) else Experts(mlp, context)
        self.mlp_output_norm = RMSNorm(size, norm_eps, context) if is_after else None

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, step: StepAttention, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        rows, residual = _added(self.input_norm, hidden, residual, self.attention.input_quant)
        hidden = self._output(self.attention_output_norm, self.attention(rows, step, cache))
        return self._mlp(hidden, residual)

    def last(
        self, hidden: Tensor, residual: Tensor | None, step: StepAttention, cache: LayerCache, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As __call__, but computes outputs of the `wanted` rows only; writes keys and values of all rows."""
        rows, residual = _added(self.input_norm, hidden, residual, self.attention.input_quant)
        attended, residual = self.attention.attend_last(rows, step, cache), residual[wanted]
        if not len(wanted):  # the middle of a prompt
            return residual, residual
        return self._mlp(self._output(self.attention_output_norm, self.attention.o(attended)), residual)

    def _mlp(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rows, residual = _added(self.post_attention_norm, hidden, residual, self.mlp.activation_quant)
        return self._output(self.mlp_output_norm, self.mlp(rows)), residual

    def _output(self, norm: RMSNorm | None, hidden: Tensor) -> Tensor:
        """What is added to the residual stream. hidden: of several ranks, what this one has of the sum."""
        hidden = self._parallel.sum(hidden)
        hidden = hidden if norm is None else norm(hidden)
        return hidden if self.spec.residual_scale == 1.0 else hidden * self.spec.residual_scale

    def norms(self) -> Iterator[tuple[str, RMSNorm]]:
        for name in ("input_norm", "attention_output_norm", "post_attention_norm", "mlp_output_norm"):
            norm: RMSNorm | None = getattr(self, name)
            if norm is not None:
                yield name, norm
        yield from self.attention.named_norms()

    def vectors(self) -> dict[tuple[str, str], Vector]:
        """By module and suffix."""
        return self.attention.vectors() | (self.mlp.vectors() if isinstance(self.mlp, Experts) else {})

    def weight_slots(self, names: Names, layer: int | str) -> dict[str, WeightSlot]:
        """Checkpoint tensor name -> slot of this layer; `layer` stands for its number in the names."""
        parts = [part for linear in self.linears() for part in linear.slots()]
        parts += [(module, "weight", norm.slot()) for module, norm in self.norms()]
        parts += [(module, suffix, vector.slot()) for (module, suffix), vector in self.vectors().items()]
        return stored_slots(parts, names, layer, self.spec.attention.num_kv_heads)

    def tensors(self) -> Iterator[Tensor]:
        """All weights."""
        for linear in self.linears():
            yield from linear.weights.values()
            if isinstance(linear, LoraLinear):
                yield from (linear.a, linear.b)
        for _, norm in self.norms():
            yield norm.weight
        for vector in self.vectors().values():
            yield vector.values

    def linears(self) -> tuple[Linear | UpProjection, ...]:
        return (*self.attention.linears(), *self.mlp.linears())

    @property
    def traits(self) -> tuple[object, ...]:
        """What decides its kernels beside the step, comparable, once it is loaded."""
        weights = [linear.weight.traits for linear in self.linears() if isinstance(linear, Linear)]
        return self.spec, weights, set(self.attention.kv_scales)


def _added(
    norm: RMSNorm | None, hidden: Tensor, residual: Tensor | None, quant: ActivationQuant[Activation]
) -> tuple[Activation, Tensor]:
    """(norm(hidden + residual) as `quant` gives it, hidden + residual); without a norm the sum itself."""
    if norm is not None:
        return norm.add(hidden, residual, quant)
    summed = hidden if residual is None else hidden + residual
    return quant.cast(summed), summed


class Decoder:
    """num_positions: rows of the rotary tables, that is the longest sequence (tokens) that may be served.

    layers: of the whole model. own_layers: of this rank's stage, with own_indices in the model; those of others have
    names and shapes, no memory, and so have the embedding, the final norm and the head, which are the first stage's.
    """

    def __init__(self, spec: DecoderSpec, context: LayerContext, backend: AttentionBackend, num_positions: int) -> None:
        self.spec = spec
        self.context = context
        self.backend = backend
        self.feature_layers: tuple[int, ...] = ()  # before which `forward` takes the residual stream as well
        self.kv_groups: tuple[int, ...] = ()  # of each layer, for batches that have several
        self._skipped: frozenset[int] = frozenset()  # layers that `abridged` leaves out
        ropes = RopeTables(num_positions, context.device)
        self.own_indices = context.parallel.own_layers(spec.num_layers)
        elsewhere = replace(context, device=torch.device("meta"), stands_for=context.computes_on)
        ends = elsewhere if context.parallel.stage else context
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, ends, spec.embedding_scale)
        contexts = [context if index in self.own_indices else elsewhere for index in range(spec.num_layers)]
        self.layers = [DecoderLayer(layer, spec.norm_eps, ropes, of) for layer, of in zip(spec.layers, contexts)]
        self.own_layers = self.layers[self.own_indices.start : self.own_indices.stop]
        self.final_norm = RMSNorm(spec.hidden_size, spec.norm_eps, ends)
        shares_table = spec.tie_word_embeddings and is_unquantized(context.head_method)
        scale = LogitScale(spec.logit_scale, spec.logit_soft_cap)
        tied = TiedHead(context.head_method, scale) if shares_table else None
        self.lm_head: TiedHead | Head = tied or Head(spec.lm_head, ends.of_head, scale)

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """Within, layers that only repeat the kernels of others are left out, unless ranks divide the layers: a start
        that compiles kernels need not launch each for every layer. What the functions return means nothing then."""
        self._skipped = self._repeated_layers() if len(self.own_layers) == len(self.layers) else frozenset()
        try:
            yield
        finally:
            self._skipped = frozenset()

    def _repeated_layers(self) -> frozenset[int]:
        """The first layer has no residual, and the last one may compute some rows only: none repeats them."""
        kinds = [layer.traits for layer in self.layers[1:-1]]
        return frozenset(index for index, kind in enumerate(kinds, start=1) if kind in kinds[: index - 1])

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[LayerCache]) -> Tensor:
        """Final hidden states of the batch's tokens, [T, hidden_size]; each layer's cache gains their keys and values.

        kv_caches: one per layer. With feature_layers, their inputs stand behind: [T, hidden_size * (1 + their number)].
        """
        hidden = self.embedding(batch.token_ids, batch.given)
        residual: Tensor | None = None
        features: dict[int, Tensor] = {}
        for index, (layer, step, cache) in enumerate(zip(self.layers, self._plan(batch), kv_caches)):
            if index in self.feature_layers:
                features[index] = hidden if residual is None else hidden + residual
            if index not in self._skipped:
                hidden, residual = layer(hidden, residual, step, cache)
        assert residual is not None
        final = self.final_norm.add(hidden, residual, PLAIN)[0]
        if not features:
            return final
        return torch.cat([final, *(features[index] for index in self.feature_layers)], dim=-1)

    def forward_last(self, batch: ForwardBatch, kv_caches: Sequence[LayerCache]) -> Tensor:
        """Final hidden states of batch.logits_indices, each its request's last row, [S, hidden_size], and no features.

        The last layer computes only keys and values of the other rows, which saves 2.7 % of an 8B model's prompt FLOPs.
        """
        hidden, residual = self.forward_layers(batch, kv_caches, range(len(self.layers)))
        return self.final_norm.add(hidden, residual, PLAIN)[0] if len(hidden) else hidden

    def forward_layers(
        self,
        batch: ForwardBatch,
        kv_caches: Sequence[LayerCache],
        layers: range,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Send the batch's tokens through some layers, whose caches gain their keys and values. No stages.

        before: what the call with the layers before these has returned; None: these are the first. Behind the last
        layer only rows of batch.logits_indices are left.
        """
        hidden, residual = (self.embedding(batch.token_ids, batch.given), None) if before is None else before
        steps, end = self._plan(batch), min(layers.stop, len(self.layers) - 1)
        for index in range(layers.start, end):
            if index not in self._skipped:
                hidden, residual = self.layers[index](hidden, residual, steps[index], kv_caches[index])
        if layers.stop > end:
            hidden, residual = self.layers[-1].last(hidden, residual, steps[-1], kv_caches[-1], batch.logits_indices)
        assert residual is not None
        return hidden, residual

    def forward_stage(
        self, hidden: Tensor, batch: ForwardBatch, kv_caches: Sequence[LayerCache], is_last_only: bool
    ) -> Tensor:
        """The residual stream behind this stage's layers, from that before them: [T, hidden_size].

        With feature_layers, the residual stream before those so far stands below it, each of T rows, in their order.
        kv_caches: of own_layers. is_last_only: rows of batch.logits_indices only, for the last stage, as forward_last.
        """
        hidden, *features = hidden.split(len(batch.token_ids))
        residual: Tensor | None = None
        steps = self._plan(batch)
        num_whole = len(self.own_layers) - is_last_only
        for index, layer, step, cache in zip(self.own_indices, self.own_layers[:num_whole], steps, kv_caches):
            if index in self.feature_layers:
                features.append(hidden if residual is None else hidden + residual)
            hidden, residual = layer(hidden, residual, step, cache)
        if is_last_only:
            last, wanted = self.own_layers[-1], batch.logits_indices
            hidden, residual = last.last(hidden, residual, steps[-1], kv_caches[-1], wanted)
        assert residual is not None
        return torch.cat([hidden + residual, *features]) if features else hidden + residual

    def num_features_before(self, layer: int) -> int:
        """How many of the feature layers lie before a layer."""
        return sum(index < layer for index in set(self.feature_layers))

    def rows_of_stream(self, stream: Tensor, num_rows: int) -> Tensor:
        """Rows of `forward`, or with is_last_only of forward_last, from what the last stage's forward_stage returns."""
        hidden, *features = stream.split(num_rows)
        final = self.final_norm(hidden)
        if not features:
            return final
        layers = sorted(set(self.feature_layers))
        return torch.cat([final, *(features[layers.index(index)] for index in self.feature_layers)], dim=-1)

    def _plan(self, batch: ForwardBatch) -> list[StepAttention]:
        """The step's attention of each own layer: one plan a KV group."""
        if not batch.other_groups:
            return [self.backend.plan(batch)] * len(self.own_layers)
        planned = [self.backend.plan(batch.of_group(group)) for group in range(1 + len(batch.other_groups))]
        return [planned[group] for group in self.kv_groups]

    def final(self, hidden: Tensor) -> Tensor:
        """The final hidden states among rows of `forward`."""
        return hidden[:, : self.spec.hidden_size] if self.feature_layers else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, …] rows of `forward` -> [S, vocab_size] float32."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """The same in the model's dtype."""
        return self.lm_head(self.final(hidden))

    def tensors(self) -> Iterator[Tensor]:
        """All weights of this rank's stage; of a tied head none but the embedding's."""
        is_first = self.context.parallel.stage == 0
        if is_first:
            yield from (self.embedding.padded, self.final_norm.weight)
        for layer in self.own_layers:
            yield from layer.tensors()
        if is_first and isinstance(self.lm_head, Linear):
            yield from self.lm_head.weights.values()

    def weight_slots(self, names: Names) -> dict[str, WeightSlot]:
        """Checkpoint tensor name -> slot, for every tensor this model needs. names: as LLAMA_NAMES."""
        slots = self._end_slots(names)
        for index, layer in enumerate(self.layers):
            slots |= layer.weight_slots(names, index)
        return slots

    def own_slots(self, names: Names) -> dict[str, WeightSlot]:
        """Those of weight_slots that this rank's stage has, in the same order."""
        slots = {} if self.context.parallel.stage else self._end_slots(names)
        for index in self.own_indices:
            slots |= self.layers[index].weight_slots(names, index)
        return slots

    def _end_slots(self, names: Names) -> dict[str, WeightSlot]:
        """Slots of what stands before and behind the layers."""
        shape = self.embedding.num_rows, self.spec.hidden_size
        table_slot = WeightSlot(shape, self._load_embedding, std=shape[1] ** -0.5, rows_axis=0)
        parts = [("embedding", "weight", table_slot), ("final_norm", "weight", self.final_norm.slot())]
        if isinstance(self.lm_head, Linear) and not self.spec.tie_word_embeddings:
            parts += self.lm_head.slots()
        return stored_slots(parts, names, 0)

    def _load_embedding(self, tensor: Tensor) -> None:
        self.embedding.load(tensor)
        if isinstance(self.lm_head, TiedHead):
            self.lm_head.tie(self.embedding)
        elif self.spec.tie_word_embeddings:  # a head that is quantised holds a copy of its own
            for _, _, slot in self.lm_head.slots():
                slot.load(tensor)
