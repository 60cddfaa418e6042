"""A multi-token-prediction module in DeepSeek-V3's layout: one decoder layer over (next token, hidden state) pairs.

h' = layer(W [norm(embedding(t[i+1])); norm(h[i])]) predicts t[i+2]; fed with its own draft and output it predicts
further tokens. The layer is of the kind of the model's last, and in its stored format if the checkpoint says so.
Source: arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from slipstream_kernels.ops import PLAIN
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.attention import ATTENTION_BACKENDS
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder, DecoderLayer
from slipstream.nn.embedding import Embedding, Head
from slipstream.nn.heads.draft_vocabulary import draft_vocabulary
from slipstream.nn.heads.tensors import check, copy_slot, draw, fill, read_shapes, read_tensors
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.linear import Linear
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.models.plain_parts import products
from slipstream.nn.norm import RMSNorm
from slipstream.nn.parallel import SINGLE
from slipstream.nn.quant import QUANT_METHODS
from slipstream.nn.rotary import RopeTables
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import module_name, mtp_layers, tensor_name
from slipstream.nn.weight_slot import WeightSlot

FIELD = "mtp_module"
_OWN = ("enorm", "hnorm", "shared_head.norm")
_PLAIN = (".weight", ".bias", ".e_score_correction_bias")
T = TypeVar("T")


def is_wanted(name: str) -> bool:
    return name.startswith("model.layers.")


def own_prefix(folder: Path, stored: Iterable[str]) -> str:
    """`model.layers.N.` of a checkpoint's first module. Raises ConfigError if there is none."""
    modules = mtp_layers(stored)
    if not modules:
        raise ConfigError(FIELD, str(folder), "holds no model.layers.N.eh_proj: no MTP module")
    return f"model.layers.{modules[0]}."


def below(prefix: str, stored: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}


def is_in_format(target: DecoderSpec, own: Iterable[str]) -> bool:
    """Whether a module's layer is stored in the model's format: it has tensors beside weights and biases."""
    has_format = target.stored_format is not None or target.expert_format is not None
    return has_format and any(not name.endswith(_PLAIN) for name in own)


def head_spec(target: DecoderSpec, own: Collection[str]) -> DecoderSpec:
    """A layer of the kind of the model's last, in the model's format if that is how its tensors are stored."""
    if not is_in_format(target, own):
        layer = replace(target.layers[-1], plain=frozenset())
        return replace(target, layers=(layer,), stored_format=None, expert_format=None)
    return replace(target, layers=(replace(target.layers[-1], plain=_plain_parts(target, own)),))


def _plain_parts(target: DecoderSpec, own: Collection[str]) -> frozenset[str]:
    """Parts of a module's layer that have weights and biases alone, though others are quantised."""
    names = FAMILIES.get(target.architecture).names_of(target)
    quantised = {name.rpartition(".")[0] for name in own if not name.endswith(_PLAIN)}
    plain: set[str] = set()
    for parts, _ in products(target.layers[-1]):
        if not any(_below_layer(tensor_name(names, part, "{layer}")) in quantised for part in parts):
            plain |= {module_name(part) for part in parts}
    return frozenset(plain)


def head_context(target: Decoder) -> LayerContext:
    """Unquantised, without adapters, and whole on every rank: a head is small, and all ranks draft the same."""
    plain = QUANT_METHODS.get("none")
    return replace(target.context, method=plain, head_method=plain, expert_method=None, parallel=SINGLE, lora=None)


class MTPModule:
    """Shares the model's embedding and head unless its checkpoint has its own. num_positions: longest sequence.

    own: names of its stored tensors, below `model.layers.N.`.
    """

    def __init__(self, target: Decoder, num_positions: int, own: Collection[str] = ()) -> None:
        keeps_format = is_in_format(target.spec, own)
        spec, context = head_spec(target.spec, own), head_context(target)
        of_layer = replace(target.context, parallel=SINGLE, lora=None) if keeps_format else context
        has_embedding, has_head = "embed_tokens.weight" in own, "shared_head.head.weight" in own
        size = spec.hidden_size
        self._hands_on_raw = FAMILIES.get(spec.architecture).mtp_hands_on == "raw"
        self.spec = spec
        self._target = target
        _, backend = ATTENTION_BACKENDS.select(lambda entry: entry.supports(spec, context.device, context.dtype))
        self.backend = backend(spec)
        self.norms = {name: RMSNorm(size, spec.norm_eps, context) for name in _OWN}
        self.projection = Linear(LinearSpec(2 * size, (("eh_proj", size),)), context)
        ropes = RopeTables(num_positions, context.device)
        self.layer = DecoderLayer(spec.layers[0], spec.norm_eps, ropes, of_layer)
        self.embedding = Embedding(spec.vocab_size, size, context) if has_embedding else target.embedding
        self._own_head = Head(spec.lm_head, context) if has_head else None
        self.head = self._own_head or draft_vocabulary(target)

    @classmethod
    def empty(cls, target: Decoder, folder: Path | None, num_positions: int = 1) -> MTPModule:
        """An unloaded module of the files' shapes; without a folder, one that shares the model's embedding and head.

        Raises ConfigError for files that `load` would refuse, from their headers."""
        if folder is None:
            return cls(target, num_positions)
        shapes = read_shapes(FIELD, folder, is_wanted)
        own = below(own_prefix(folder, shapes), shapes)
        module = cls(target, num_positions, own)
        check(FIELD, folder, module.slots(), own)
        return module

    @classmethod
    def load(cls, target: Decoder, folder: Path | None, num_positions: int) -> MTPModule:
        """Load `model.layers.N.{enorm,hnorm,eh_proj,shared_head…,self_attn…,mlp…}`, N at or past the model's layers.

        If there are several modules, the first is loaded. Without a folder the weights are random.
        """
        module = cls.empty(target, folder, num_positions)
        if folder is None:
            draw(module.slots(), target.context)
        else:
            prefix = own_prefix(folder, read_shapes(FIELD, folder, is_wanted))
            stored = read_tensors(FIELD, folder, lambda name: name.startswith(prefix))  # not those of the model
            fill(FIELD, folder, module.slots(), below(prefix, stored))
        return module

    def tensors(self) -> Iterator[Tensor]:
        """All weights of its own."""
        yield from (norm.weight for norm in self.norms.values())
        yield from self.projection.weights.values()
        yield from self.layer.tensors()
        if self.embedding is not self._target.embedding:
            yield self.embedding.padded
        if isinstance(self.head, Linear) and self.head is not self._target.lm_head:
            yield from self.head.weights.values()

    def slots(self) -> dict[str, WeightSlot]:
        """By name below `model.layers.N.`."""
        slots = {f"{name}.weight": norm.slot() for name, norm in self.norms.items()}
        for _, suffix, slot in self.projection.slots():
            slots[f"eh_proj.{suffix}"] = slot
        own = self.layer.weight_slots(FAMILIES.get(self.spec.architecture).names_of(self.spec), "{layer}")
        slots |= {_below_layer(name): slot for name, slot in own.items()}
        if self.embedding is not self._target.embedding:
            slots["embed_tokens.weight"] = copy_slot(self.embedding.weight)
        if self._own_head is not None:
            slots |= {f"shared_head.head.{suffix}": slot for _, suffix, slot in self._own_head.slots()}
        return slots

    def forward(self, batch: ForwardBatch, hidden: Tensor, cache: LayerCache) -> Tensor:
        """batch: token i + 1 at the position and slot of token i. hidden: [T, hidden_size] at token i, the model's or
        this module's own. Returns [T, hidden_size]: of `logits`, and of the next call. The cache gains a layer's KV."""
        pair = [self.norms["enorm"](self.embedding(batch.token_ids)), self.norms["hnorm"](hidden)]
        hidden, residual = self.layer(self.projection(torch.cat(pair, dim=-1)), None, self.backend.plan(batch), cache)
        normed, raw = self.norms["shared_head.norm"].add(hidden, residual, PLAIN)
        return raw if self._hands_on_raw else normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: rows of `forward`."""
        return self.head(self.norms["shared_head.norm"](hidden) if self._hands_on_raw else hidden)


def _below_layer(name: str) -> str:
    return name.split("{layer}.")[1]
