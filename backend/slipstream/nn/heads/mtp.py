"""A multi-token-prediction module in DeepSeek-V3's layout: one decoder layer over (next token, hidden state) pairs.

h' = layer(W [norm(embedding(t[i+1])); norm(h[i])]) predicts t[i+2]; fed with its own draft and output it predicts
further tokens. The layer is of the model's kind. Source: arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from slipstream_kernels.gemm.activation_quant import PLAIN
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.attention import ATTENTION_BACKENDS, LayerCache
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder, DecoderLayer
from slipstream.nn.embedding import Embedding
from slipstream.nn.heads.draft_vocabulary import draft_vocabulary
from slipstream.nn.heads.tensors import copy_slot, draw, fill, read_shapes, read_tensors
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.linear import Linear
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.norm import RMSNorm
from slipstream.nn.quant import QUANT_METHODS
from slipstream.nn.rotary import RopeTables
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.weight_slot import WeightSlot

FIELD = "mtp_module"
_OWN = ("enorm", "hnorm", "shared_head.norm")
T = TypeVar("T")


def is_wanted(name: str) -> bool:
    return _layer_of(name) >= 0


def own_names(folder: Path, stored: Mapping[str, T]) -> dict[str, T]:
    """Tensors of a checkpoint's first module, by name below `model.layers.N.`. Raises ConfigError if there is none."""
    modules = sorted({_layer_of(name) for name in stored if name.endswith(".eh_proj.weight")})
    if not modules:
        raise ConfigError(FIELD, str(folder), "holds no model.layers.N.eh_proj.weight: no MTP module")
    prefix = f"model.layers.{modules[0]}."
    return {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}


def head_spec(target: DecoderSpec) -> DecoderSpec:
    """A layer of the kind of the model's last, unquantised."""
    return replace(target, layers=target.layers[-1:], stored_format=None, expert_format=None)


def head_context(target: Decoder) -> LayerContext:
    plain = QUANT_METHODS.get("none")
    return replace(target.context, method=plain, head_method=plain, expert_method=None)


class MTPModule:
    """Shares the model's embedding and head unless its checkpoint has its own. num_positions: longest sequence."""

    def __init__(
        self, target: Decoder, num_positions: int, has_embedding: bool = False, has_head: bool = False
    ) -> None:
        spec, context = head_spec(target.spec), head_context(target)
        size = spec.hidden_size
        self.spec = spec
        self._target = target
        _, backend = ATTENTION_BACKENDS.select(lambda entry: entry.supports(spec, context.device, context.dtype))
        self.backend = backend(spec)
        self.norms = {name: RMSNorm(size, spec.norm_eps, context) for name in _OWN}
        self.projection = Linear(LinearSpec(2 * size, (("eh_proj", size),)), context)
        ropes = RopeTables(num_positions, context.device)
        self.layer = DecoderLayer(spec.layers[0], spec.norm_eps, ropes, context)
        self.embedding = Embedding(spec.vocab_size, size, context) if has_embedding else target.embedding
        self._own_head = Linear(spec.lm_head, context) if has_head else None
        self.head = self._own_head or draft_vocabulary(target)

    @classmethod
    def empty(cls, target: Decoder, folder: Path | None, num_positions: int = 1) -> MTPModule:
        """An unloaded module of the files' shapes; without a folder, one that shares the model's embedding and head."""
        own = {} if folder is None else own_names(folder, read_shapes(FIELD, folder, is_wanted))
        return cls(target, num_positions, "embed_tokens.weight" in own, "shared_head.head.weight" in own)

    @classmethod
    def load(cls, target: Decoder, folder: Path | None, num_positions: int) -> MTPModule:
        """Load `model.layers.N.{enorm,hnorm,eh_proj,shared_head…,self_attn…,mlp…}`, N at or past the model's layers.

        If there are several modules, the first is loaded. Without a folder the weights are random.
        """
        module = cls.empty(target, folder, num_positions)
        if folder is None:
            draw(module.slots(), target.context)
        else:
            fill(FIELD, folder, module.slots(), own_names(folder, read_tensors(FIELD, folder, is_wanted)))
        return module

    def tensors(self) -> Iterator[Tensor]:
        """All weights of its own."""
        yield from (norm.weight for norm in self.norms.values())
        yield from self.projection.weights.values()
        yield from self.layer.tensors()
        if self.embedding is not self._target.embedding:
            yield self.embedding.weight
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
        return self.norms["shared_head.norm"].add(hidden, residual, PLAIN)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def _layer_of(name: str) -> int:
    """N of model.layers.N.…, -1 for other names."""
    parts = name.split(".")
    is_layer = parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal()
    return int(parts[2]) if is_layer else -1


def _below_layer(name: str) -> str:
    return name.split("{layer}.")[1]
