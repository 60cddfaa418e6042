"""Medusa heads: each drafts one token from the model's last hidden state. Source: arXiv:2401.10774.

Head i (from 0) predicts token t + i + 2 from the hidden state of token t: x = x + SiLU(W x + b), `medusa_num_layers`
times, then its own vocabulary matrix, or the model's if the checkpoint has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.decoder import Decoder
from slipstream.nn.embedding import Head
from slipstream.nn.heads.draft_vocabulary import own_vocabulary
from slipstream.nn.heads.tensors import check, copy_slot, draw, fill, read_shapes, read_tensors
from slipstream.nn.weight_slot import WeightSlot

FIELD = "medusa_heads"
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$")
T = TypeVar("T")
DUMMY_HEADS = 4


def is_wanted(name: str) -> bool:
    """Whether a stored tensor belongs to a head: files of Medusa-2 contain the model too."""
    return _NAME.search(name) is not None


def own_names(stored: Mapping[str, T]) -> dict[str, T]:
    """Tensors by names like 0.0.linear.weight: head, layer, parameter."""
    return {".".join(match.groups()): value for name, value in stored.items() if (match := _NAME.search(name))}


def count_layers(names: Iterable[str]) -> int:
    """Layers of each head before its vocabulary matrix."""
    return sum(name.startswith("0.") and name.endswith("linear.weight") for name in names)


class MedusaHeads:
    """weight: [num_layers, num_heads, hidden, hidden], bias: [num_layers, num_heads, 1, hidden].

    vocabulary: one linear per head, or None.
    """

    def __init__(self, target: Decoder, num_heads: int, num_layers: int, has_vocabulary: bool) -> None:
        size, context = target.spec.hidden_size, target.context
        self.num_heads = num_heads
        self._target = target
        make = {"device": context.device, "dtype": context.dtype}
        self.weight = torch.empty(num_layers, num_heads, size, size, **make)  # type: ignore[call-overload]
        self.bias = torch.zeros(num_layers, num_heads, 1, size, **make)  # type: ignore[call-overload]
        self.vocabulary: list[Head] | None = None
        if has_vocabulary:
            self.vocabulary = [own_vocabulary(target) for _ in range(num_heads)]

    @classmethod
    def empty(cls, target: Decoder, folder: Path | None) -> MedusaHeads:
        """Unloaded heads of the files' shapes; without a folder, four heads of one layer and a vocabulary matrix.

        Raises ConfigError for files that `load` would refuse, from their headers."""
        if folder is None:
            return cls(target, DUMMY_HEADS, 1, has_vocabulary=True)
        shapes = own_names(read_shapes(FIELD, folder, is_wanted))
        num_heads = 1 + max(int(name.split(".")[0]) for name in shapes)
        num_layers = count_layers(shapes)
        if not num_layers:
            raise ConfigError(FIELD, str(folder), "holds no 0.0.linear.weight")
        heads = cls(target, num_heads, num_layers, f"0.{num_layers}.weight" in shapes)
        check(FIELD, folder, heads.slots(), shapes)
        return heads

    @classmethod
    def load(cls, target: Decoder, folder: Path | None) -> MedusaHeads:
        """Layouts: `0.0.linear.weight`, …, `0.1.weight` (FasterDecoding), with or without `medusa_head.` in front.

        Without a folder the weights are drawn.
        """
        heads = cls.empty(target, folder)
        if folder is None:
            draw(heads.slots(), target.context)
        else:
            fill(FIELD, folder, heads.slots(), own_names(read_tensors(FIELD, folder, is_wanted)))
        return heads

    def tensors(self) -> Iterator[Tensor]:
        """All weights of its own."""
        yield from (self.weight, self.bias)
        for linear in self.vocabulary or ():
            yield from linear.weights.values()

    def slots(self) -> dict[str, WeightSlot]:
        slots = {}
        num_layers = self.weight.shape[0]
        for head in range(self.num_heads):
            for layer in range(num_layers):
                slots[f"{head}.{layer}.linear.weight"] = copy_slot(self.weight[layer, head])
                slots[f"{head}.{layer}.linear.bias"] = copy_slot(self.bias[layer, head, 0])
            if self.vocabulary is not None:
                for _, suffix, slot in self.vocabulary[head].slots():
                    slots[f"{head}.{num_layers}.{suffix}"] = slot
        return slots

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """hidden: [R, hidden_size], final hidden states -> [R, vocab_size] of each head."""
        x = hidden.expand(self.num_heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias):
            x = x + F.silu(torch.baddbmm(bias, x, weight.transpose(1, 2)))
        if self.vocabulary is not None:
            return [linear(rows) for linear, rows in zip(self.vocabulary, x.unbind())]
        return self._target.lm_head(x.flatten(0, 1)).unflatten(0, (self.num_heads, -1)).unbind()
