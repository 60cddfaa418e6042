"""What a family's checkpoints store otherwise than the decoder multiplies it, as data of its name map.

Each is applied to a tensor as it is read, before it is quantised or cut; `stored_shape` is what the file must hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.weight_slot import FLOAT_DTYPES, WeightSlot

LEAST_NORM = 1e-12


class Transform(Protocol):
    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """shape: what the decoder wants."""
        ...

    def apply(self, tensor: Tensor) -> Tensor: ...

    def suffixes(self) -> tuple[str, ...]:
        """Of the tensors of a module that it changes; the others are loaded as they are."""
        ...


@dataclass(frozen=True)
class Transpose:
    """Stored [in, out]."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.t()

    def suffixes(self) -> tuple[str, ...]:
        return ("weight",)


@dataclass(frozen=True)
class AddOne:
    """Stored as w of 1 + w, as Gemma's norms are."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.float() + 1

    def suffixes(self) -> tuple[str, ...]:
        return ("weight",)


@dataclass(frozen=True)
class NormaliseRows:
    """Multiplied with every row of length 1, as Baichuan2's head is."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        rows = tensor.float()
        return rows / rows.norm(dim=1, keepdim=True).clamp(min=LEAST_NORM)

    def suffixes(self) -> tuple[str, ...]:
        return ("weight",)


@dataclass(frozen=True)
class PermuteRows:
    """Row i of every len(order) rows is the stored row order[i]: how neighbouring pairs of a rotation become halves."""

    order: tuple[int, ...]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, len(self.order)))[:, list(self.order)].flatten(0, 1)

    def suffixes(self) -> tuple[str, ...]:
        return ("weight", "bias")


def transformed(slot: WeightSlot, suffix: str, name: str, transforms: tuple[Transform, ...]) -> WeightSlot:
    """A slot for the stored form. transforms: in the order in which they are applied to what is stored.

    Raises ConfigError for a quantised tensor: its words and scales have other axes.
    """
    wanted = [transform for transform in transforms if suffix in transform.suffixes()]
    if transforms and (slot.dtypes != FLOAT_DTYPES or suffix not in ("weight", "bias")):
        raise ConfigError("model", f"{name}.{suffix}", f"is quantised, and needs {transforms[0]}: not served")
    shape, mean = slot.shape, slot.mean
    for transform in reversed(wanted):
        shape = transform.stored_shape(shape)
        mean -= isinstance(transform, AddOne)
    return replace(slot, shape=shape, mean=mean, load=partial(_load, slot.load, tuple(wanted)))


def _load(load: Callable[[Tensor], None], transforms: tuple[Transform, ...], tensor: Tensor) -> None:
    for transform in transforms:
        tensor = transform.apply(tensor)
    load(tensor)
