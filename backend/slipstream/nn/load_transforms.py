"""Transforms between a family's stored tensors and the decoder's, as data of its name map.

Each is applied to a tensor as it is read, before it is quantised or sharded; `stored_shape` is the shape in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.weight_slot import FLOAT_DTYPES, SELECTION_BIAS, WeightSlot

LEAST_NORM = 1e-12
PLAIN_SUFFIXES = ("weight", "bias", SELECTION_BIAS)  # of tensors that no method quantises


class Transform(Protocol):
    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file. shape: of the decoder's tensor."""
        ...

    def apply(self, tensor: Tensor) -> Tensor: ...

    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the module's tensors that it changes; the others are loaded unchanged."""
        ...


@dataclass(frozen=True)
class AddOne:
    """The weight is 1 + the stored tensor, as in Gemma's norms."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.float() + 1

    def suffixes(self) -> tuple[str, ...]:
        return ("weight",)


@dataclass(frozen=True)
class NormaliseRows:
    """Scale every row to length 1, as in Baichuan2's head."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        rows = tensor.float()
        return rows / rows.norm(dim=1, keepdim=True).clamp(min=LEAST_NORM)

    def suffixes(self) -> tuple[str, ...]:
        return ("weight",)


@dataclass(frozen=True)
class Unsqueeze:
    """Stored with a first axis of length 1, as ERNIE's biases of experts."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1, *shape)

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.squeeze(0)

    def suffixes(self) -> tuple[str, ...]:
        return (SELECTION_BIAS,)


def transformed(slot: WeightSlot, suffix: str, name: str, transforms: tuple[Transform, ...]) -> WeightSlot:
    """A slot for the stored form. transforms: in the order of their application to the stored tensor.

    Raises ConfigError for a quantised tensor, whose packed words and scales have other axes.
    """
    wanted = [transform for transform in transforms if suffix in transform.suffixes()]
    if transforms and (slot.dtypes != FLOAT_DTYPES or suffix not in PLAIN_SUFFIXES):
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
