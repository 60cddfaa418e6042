"""Name map of a checkpoint: the decoder's module name -> the file's name, and the stored form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.load_transforms import Transform, transformed
from slipstream.nn.weight_slot import WeightSlot

_MTP_MODULE = re.compile(r"model\.layers\.([0-9]{1,6})\.eh_proj\.")
SPLITS = ("rows", "interleaved", "heads")


@dataclass(frozen=True)
class Stored:
    """A module whose tensors are stored in another form."""

    name: str
    transforms: tuple[Transform, ...]


@dataclass(frozen=True)
class Fused:
    """Modules that are stored as one tensor. parts: the decoder's names, in the order of the stored rows.

    split: "rows": one part after the other; "interleaved": alternating rows; "heads": for each key head, its rows of
    each part.
    """

    name: str
    parts: tuple[str, ...]
    split: str = "rows"


@dataclass(frozen=True)
class Stacked:
    """Experts' modules that are stored as one tensor of three axes, experts first, each as Fused has its parts.

    Tensors are called "name" for weights, and "name_suffix" for others; with is_module "name.suffix", as others are.
    is_transposed: a weight is stored [in, out].
    """

    name: str
    parts: tuple[str, ...]
    split: str = "rows"
    is_transposed: bool = False
    is_module: bool = False

    def tensor(self, stored: str, suffix: str) -> str:
        """The name of a layer's tensor. stored: `name` of this layer."""
        if self.is_module:
            return f"{stored}.{suffix}"
        return stored if suffix == "weight" else f"{stored}_{suffix}"


Name = str | Stored | Fused | Stacked
Names = Mapping[str, Name]
Part = tuple[str, str, WeightSlot]  # the decoder's name, suffix


def tensor_name(names: Names, part: str, layer: int | str) -> str:
    """The checkpoint's name of a part of a layer; "gate.3" is the gate of expert 3, mapped by "expert_gate"."""
    name, expert = names[module_name(part)], part.partition(".")[2]
    return (name if isinstance(name, str) else name.name).format(layer=layer, expert=expert)


def module_name(part: str) -> str:
    """Under what a map of names has a decoder's part."""
    module, _, expert = part.partition(".")
    return f"expert_{module}" if expert else module


def stored_slots(parts: Iterable[Part], names: Names, layer: int | str, num_heads: int = 1) -> dict[str, WeightSlot]:
    """Stored name -> slot of the parts of one layer. num_heads: of keys, by which Fused "heads" are split."""
    slots: dict[str, WeightSlot] = {}
    stacked: dict[tuple[Stacked, str, str], dict[str, WeightSlot]] = {}
    fused: dict[tuple[Fused, str, str], dict[str, WeightSlot]] = {}
    for part, suffix, slot in parts:
        stored, name = tensor_name(names, part, layer), names.get(module_name(part))
        if isinstance(name, Stacked):
            stacked.setdefault((name, stored, suffix), {})[part] = slot
        elif isinstance(name, Fused):
            fused.setdefault((name, stored, suffix), {})[part] = slot
        elif isinstance(name, Stored):
            slots[f"{stored}.{suffix}"] = transformed(slot, suffix, stored, name.transforms)
        else:
            slots[f"{stored}.{suffix}"] = slot
    for (name, stored, suffix), own in fused.items():
        split = _Split(f"{stored}.{suffix}", [own[part] for part in name.parts], name.split, num_heads)
        slots[f"{stored}.{suffix}"] = split.slot()
    for (stack, stored, suffix), own in stacked.items():
        tensor = stack.tensor(stored, suffix)
        slots[tensor] = _stacked_slot(stack, tensor, suffix, own)
    return slots


def _stacked_slot(name: Stacked, stored: str, suffix: str, own: dict[str, WeightSlot]) -> WeightSlot:
    """own: slots of the parts of all experts, as "gate.3"."""
    experts = dict.fromkeys(part.partition(".")[2] for part in own)
    slots = [
        _Split(stored, [own[f"{part}.{expert}"] for part in name.parts], name.split, 1).slot() for expert in experts
    ]
    transposes = name.is_transposed and suffix == "weight"
    shape = slots[0].shape[::-1] if transposes else slots[0].shape

    def load(tensor: Tensor) -> None:
        for slot, expert in zip(slots, tensor.unbind(), strict=True):
            slot.load(expert.t() if transposes else expert)

    return replace(slots[0], shape=(len(slots), *shape), load=load, num_rows=sum(slot.num_rows for slot in slots))


class _Split:
    """Loads one stored tensor by passing its rows to the slots of its parts."""

    def __init__(self, name: str, slots: list[WeightSlot], split: str, num_heads: int) -> None:
        if split not in SPLITS:
            raise ConfigError("model", name, f"split {split!r} is none of {', '.join(SPLITS)}")
        self._slots, self._axis = slots, slots[0].rows_axis
        self._num_groups = {"rows": 1, "interleaved": slots[0].num_rows, "heads": num_heads}[split]
        self._lengths = [] if self._axis is None else [slot.shape[self._axis] for slot in slots]
        if any(length % self._num_groups for length in self._lengths):
            raise ConfigError("model", name, f"rows stored as {split} of this format do not come apart")

    def slot(self) -> WeightSlot:
        first = self._slots[0]
        shape = list(first.shape)
        if self._axis is not None:
            shape[self._axis] = sum(self._lengths)
        return replace(first, shape=tuple(shape), load=self.load, num_rows=sum(slot.num_rows for slot in self._slots))

    def load(self, tensor: Tensor) -> None:
        for slot, piece in zip(self._slots, self._pieces(tensor)):
            slot.load(piece)

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        if self._slots[0].says_shape is not None:
            return self._shapes(tensor)
        if self._axis is None:
            return [tensor] * len(self._slots)
        axis, count = self._axis, self._num_groups
        groups = tensor.unflatten(axis, (count, -1))
        pieces = groups.split([length // count for length in self._lengths], dim=axis + 1)
        return [piece.flatten(axis, axis + 1) for piece in pieces]

    def _shapes(self, tensor: Tensor) -> list[Tensor]:
        shapes = [slot.says_shape for slot in self._slots if slot.says_shape is not None]
        expected = [sum(rows for rows, _ in shapes), shapes[0][1]]
        if tensor.tolist() != expected:
            raise ValueError(f"says {tensor.tolist()}, config.json implies {expected}")
        return [torch.tensor(shape) for shape in shapes]


def mtp_layers(stored: Iterable[str]) -> list[int]:
    """The numbers N of modules for multi-token prediction in DeepSeek-V3's layout: model.layers.N has an eh_proj."""
    return sorted({int(found[1]) for name in stored if (found := _MTP_MODULE.match(name))})
