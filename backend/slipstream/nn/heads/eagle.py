"""EAGLE heads: one decoder layer that predicts the model's next features, and a draft token from each.

EAGLE and EAGLE-2: x = W [embedding(t[i+1]); f[i]], f the final hidden state; the layer has no input norm, its output is
f[i+1], and the model's own head reads it. EAGLE-3: g = W [low; middle; high layer's states], the layer attends over
[norm(embedding(t[i+1])); norm(g[i])], its output is g[i+1], and a head of its own, perhaps over part of the
vocabulary, reads norm(g). Sources: arXiv:2401.15077, arXiv:2406.16858, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from slipstream_kernels.ops import PLAIN
from torch import Tensor

from slipstream.core.errors import ConfigError, naming
from slipstream.nn.attention import ATTENTION_BACKENDS
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.embedding import Embedding, Head
from slipstream.nn.heads.draft_vocabulary import draft_vocabulary
from slipstream.nn.heads.mtp import head_context
from slipstream.nn.heads.tensors import check, copy_slot, draw, fill, read_shapes, read_tensors
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, LayerSpec, LinearSpec
from slipstream.nn.linear import Linear
from slipstream.nn.mlp import MLP
from slipstream.nn.models import family_of
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.norm import RMSNorm
from slipstream.nn.rotary import RopeTables
from slipstream.nn.self_attention import SelfAttention
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import tensor_name
from slipstream.nn.weight_slot import WeightSlot

FIELD = "eagle_head"
NUM_FEATURES = 3  # layers whose states EAGLE-3 reads
T = TypeVar("T")


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers before which EAGLE-3 takes the residual stream: low, middle, high. Dummies may have fewer than three."""
    return min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)


def own_names(stored: Mapping[str, T]) -> tuple[dict[str, T], bool]:
    """A head's stored tensors by the names of EagleHead.slots, and whether it is an EAGLE-3 head."""
    plain = {name.removeprefix("model."): value for name, value in stored.items()}
    is_third = any(name.startswith("midlayer.") for name in plain)
    left_out = {"t2d"}  # the inverse of d2t
    if not is_third:
        left_out.add("lm_head.weight")  # the model's own
    own = {name.replace("midlayer.", "layers.0."): value for name, value in plain.items() if name not in left_out}
    return own, is_third


def read_head_spec(folder: Path, target: DecoderSpec) -> DecoderSpec:
    """The head's layer from its config.json, whose architecture may have any name. Raises ConfigError."""
    with naming(FIELD):
        config = HFConfig.read(folder)
        known = HFConfig("config.json", {**config.values, "architectures": ["LlamaForCausalLM"]})
        spec = family_of(known).read_spec(known)
    if spec.hidden_size != target.hidden_size or spec.vocab_size != target.vocab_size:
        sizes = f"hidden_size={spec.hidden_size}, vocab_size={spec.vocab_size}"
        raise ConfigError(FIELD, str(folder), f"{sizes}; the model's are {target.hidden_size}, {target.vocab_size}")
    return replace(spec, layers=spec.layers[:1], tie_word_embeddings=False)


def dummy_spec(target: DecoderSpec) -> DecoderSpec:
    """A layer of the model's shape; always a dense one, as published heads are beside MoE models too."""
    last = target.layers[-1]
    mlp = last.mlp if isinstance(last.mlp, DenseSpec) else DenseSpec(target.hidden_size, last.mlp.intermediate_size)
    layer = LayerSpec(_grouped(last.attention), mlp)
    return replace(target, layers=(layer,), stored_format=None, expert_format=None)


def _grouped(attention: AttentionSpec) -> AttentionSpec:
    """Heads as the model's; of a model with latent attention heads of keys and values of their own."""
    if attention.latent is not None:
        value_dim, heads = attention.latent.value_dim, attention.num_q_heads
        attention = replace(attention, latent=None, head_dim=value_dim, num_kv_heads=heads, scale=None)
    return replace(attention, sliding_window=None)


def dummy_vocab_size(target: DecoderSpec) -> int:
    return max(1, target.vocab_size // 4)


class EagleHead:
    """is_third: EAGLE-3. draft_vocab_size: rows of its own head (EAGLE-3), whose row i is token i + offsets[i]."""

    def __init__(
        self,
        target: Decoder,
        spec: DecoderSpec,
        num_positions: int,
        is_third: bool,
        has_bias: bool = False,
        has_embedding: bool = False,
        draft_vocab_size: int = 0,
    ) -> None:
        size, context = spec.hidden_size, head_context(target)
        self.spec = spec.map_attention(lambda own: replace(own, num_inputs=2 * size if is_third else size))
        layer = self.spec.layers[0]
        assert isinstance(layer.mlp, DenseSpec)
        self.is_third = is_third
        self._target = target
        _, backend = ATTENTION_BACKENDS.select(lambda entry: entry.supports(spec, context.device, context.dtype))
        self.backend = backend(self.spec)
        num_inputs = NUM_FEATURES * size if is_third else 2 * size
        self.fc = Linear(LinearSpec(num_inputs, (("fc", size),), bias=has_bias), context)
        self.attention = SelfAttention(
            layer.attention, spec.norm_eps, RopeTables(num_positions, context.device), context
        )
        self.mlp = MLP(layer.mlp, context)
        names = ("post_attention_layernorm", *(("input_layernorm", "hidden_norm", "norm") if is_third else ()))
        self.norms = {name: RMSNorm(size, spec.norm_eps, context) for name in names}
        self.embedding = Embedding(spec.vocab_size, size, context) if has_embedding else target.embedding
        self.head: Head | None = None
        self._shared_head = target.lm_head if is_third else draft_vocabulary(target)
        self.offsets: Tensor | None = None
        if draft_vocab_size:
            self.head = Head(LinearSpec(size, (("lm_head", draft_vocab_size),), shard="vocabulary"), context)
            self.offsets = torch.zeros(draft_vocab_size, dtype=torch.int64, device=context.device)

    @classmethod
    def empty(cls, target: Decoder, folder: Path | None, num_positions: int = 1) -> EagleHead:
        """An unloaded head of the files' shapes; without a folder, EAGLE-3 with a quarter of the vocabulary.

        Raises ConfigError for files that `load` would refuse, from their headers."""
        if folder is None:
            spec = dummy_spec(target.spec)
            return cls(target, spec, num_positions, True, draft_vocab_size=dummy_vocab_size(spec))
        shapes, is_third = own_names(read_shapes(FIELD, folder))
        if is_third and target.spec.num_layers < NUM_FEATURES:
            raise ConfigError(FIELD, str(folder), f"EAGLE-3 reads {NUM_FEATURES} layers of a model: this one has fewer")
        head = shapes.get("lm_head.weight")
        if is_third and head is None:
            raise ConfigError(FIELD, str(folder), "lacks lm_head.weight")
        module = cls(
            target,
            read_head_spec(folder, target.spec),
            num_positions,
            is_third,
            has_bias="fc.bias" in shapes,
            has_embedding="embed_tokens.weight" in shapes,
            draft_vocab_size=head[0] if is_third and head is not None else 0,
        )
        check(FIELD, folder, module.slots(), shapes)
        return module

    @classmethod
    def load(cls, target: Decoder, folder: Path | None, num_positions: int) -> EagleHead:
        """Load a published layout; every name may have the prefix `model.`. Without a folder the weights are random."""
        module = cls.empty(target, folder, num_positions)
        if folder is None:
            draw({name: slot for name, slot in module.slots().items() if name != "d2t"}, target.context)
        else:
            fill(FIELD, folder, module.slots(), own_names(read_tensors(FIELD, folder))[0])
        return module

    def tensors(self) -> Iterator[Tensor]:
        """All weights of its own."""
        shared = self._shared_head
        linears = [*self._linears(), *(linear for linear in (self.head,) if linear is not None)]
        if isinstance(shared, Linear) and shared is not self._target.lm_head:
            linears.append(shared)
        for linear in linears:
            yield from linear.weights.values()
        yield from (norm.weight for norm in self.norms.values())
        if self.embedding is not self._target.embedding:
            yield self.embedding.padded
        if self.offsets is not None:
            yield self.offsets

    def _linears(self) -> tuple[Linear, ...]:
        return (self.fc, self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return feature_layers(self._target.spec.num_layers) if self.is_third else ()

    def slots(self) -> dict[str, WeightSlot]:
        slots = {f"fc.{suffix}": slot for _, suffix, slot in self.fc.slots()}
        for linear in self._linears()[1:]:
            for part, suffix, slot in linear.slots():
                slots[f"{tensor_name(LLAMA_NAMES, part, 0).removeprefix('model.')}.{suffix}"] = slot
        for name, norm in self.norms.items():
            slots["norm.weight" if name == "norm" else f"layers.0.{name}.weight"] = norm.slot()
        if self.embedding is not self._target.embedding:
            slots["embed_tokens.weight"] = copy_slot(self.embedding.weight)
        if self.head is not None and self.offsets is not None:
            slots |= {f"lm_head.{suffix}": slot for _, suffix, slot in self.head.slots()}
            slots["d2t"] = replace(copy_slot(self.offsets), is_optional=True)
        return slots

    def first_features(self, hidden: Tensor) -> Tensor:
        """hidden: rows of Decoder.forward, which has the feature layers' states behind the final one -> [T, size]."""
        size = self._target.spec.hidden_size
        return self.fc(hidden[:, size:]) if self.is_third else hidden[:, :size]

    def forward(self, batch: ForwardBatch, features: Tensor, cache: LayerCache) -> Tensor:
        """batch: token i + 1 at the position and slot of token i. features: [T, size] at token i.

        Returns the features of token i + 1, [T, size]. The cache gains a layer's KV."""
        embedded = self.embedding(batch.token_ids)
        step = self.backend.plan(batch)
        if self.is_third:
            residual = features
            pair = [self.norms["input_layernorm"](embedded), self.norms["hidden_norm"](features)]
            hidden = self.attention(torch.cat(pair, dim=-1), step, cache)
        else:
            residual = self.fc(torch.cat([embedded, features], dim=-1))
            hidden = self.attention(residual, step, cache)
        normed, residual = self.norms["post_attention_layernorm"].add(hidden, residual, PLAIN)
        return self.mlp(normed) + residual

    def logits(self, features: Tensor) -> Tensor:
        """[R, rows of the head]."""
        if self.head is None:
            return self._shared_head(features)
        return self.head(self.norms["norm"](features))

    def token_ids(self, rows: Tensor) -> Tensor:
        """The token ids of rows of the head's vocabulary."""
        return rows if self.offsets is None else rows + self.offsets[rows]
