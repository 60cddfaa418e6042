"""Loads published head checkpoints (safetensors or pickled state dicts) into the slots of a module. Missing and
unexpected keys are errors that name them, before anything is loaded.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.weight_slot import WeightSlot, long_axes

T = TypeVar("T")
# raised by torch for bytes that are no pickle of tensors, besides RuntimeError
_NO_PICKLE = (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError)
_PATTERNS = ("*.safetensors", "*.bin", "*.pt")


def read_tensors(field: str, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Tensors of a folder by name, on the host. Raises ConfigError (naming `field`) if there are none."""
    return _read_folder(field, folder, wanted, _Reading("cpu", _stored_tensor, lambda tensor: tensor))


def read_shapes(
    field: str, folder: Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors, from headers only. Raises ConfigError as read_tensors does."""
    return _read_folder(field, folder, wanted, _Reading("meta", _stored_shape, lambda tensor: tuple(tensor.shape)))


@dataclass(frozen=True)
class _Reading(Generic[T]):
    """The value to read for each tensor, from a safetensors file by name or from a tensor unpickled to `device`."""

    device: str
    of_file: Callable[[Any, str], T]
    of_pickled: Callable[[Tensor], T]


def _stored_tensor(file: Any, name: str) -> Tensor:
    return file.get_tensor(name)


def _stored_shape(file: Any, name: str) -> tuple[int, ...]:
    return tuple(file.get_slice(name).get_shape())


def _read_folder(field: str, folder: Path, wanted: Callable[[str], bool], reading: _Reading[T]) -> dict[str, T]:
    """Read the files of the first pattern that has any tensors."""
    if not folder.is_dir():
        raise ConfigError(field, str(folder), "no such folder")
    for pattern in _PATTERNS:
        found: dict[str, T] = {}
        for file in sorted(folder.glob(pattern)):
            found.update(_read_file(field, file, wanted, reading))
        if found:
            return found
    raise ConfigError(field, str(folder), f"holds no tensors of such a head in {', '.join(_PATTERNS)}")


def check(field: str, folder: Path, slots: Mapping[str, WeightSlot], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError for a tensor that is missing, not expected, or of another shape."""
    missing = [name for name, slot in slots.items() if name not in shapes and not slot.is_optional]
    unexpected = [name for name in shapes if name not in slots]
    if missing or unexpected:
        what = f"lacks {missing[0]}" if missing else f"holds {unexpected[0]}, which this head has no place for"
        raise ConfigError(field, str(folder), f"{what} ({len(missing)} missing, {len(unexpected)} unexpected)")
    for name, shape in shapes.items():
        if long_axes(shape) != long_axes(slots[name].shape):
            told = f"{list(shape)}, expected {list(slots[name].shape)}"
            raise ConfigError(field, str(folder), f"tensor {name} has shape {told}: is it for this model?")


def fill(field: str, folder: Path, slots: Mapping[str, WeightSlot], tensors: Mapping[str, Tensor]) -> None:
    """Load every slot. Raises ConfigError as `check`, before anything is loaded."""
    check(field, folder, slots, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in sorted(tensors.items(), key=lambda item: not slots[item[0]].is_index):
        slots[name].load(tensor.reshape(slots[name].shape))


def draw(slots: Mapping[str, WeightSlot], context: LayerContext) -> None:
    """Random weights through the same slots."""
    generator = torch.Generator(context.device).manual_seed(0)
    for slot in slots.values():
        tensor = torch.empty(slot.shape, device=context.device, dtype=context.dtype)
        slot.load(tensor.normal_(slot.mean, slot.std, generator=generator))


def copy_slot(tensor: Tensor, std: float = 0.02) -> WeightSlot:
    """A slot that is the tensor itself."""

    def load(stored: Tensor) -> None:
        tensor.copy_(stored)

    return WeightSlot(tuple(tensor.shape), load, std=std)


def _read_file(field: str, file: Path, wanted: Callable[[str], bool], reading: _Reading[T]) -> dict[str, T]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.keys() if wanted(name)]  # noqa: SIM118  (not a mapping)
                return {name: reading.of_file(tensors, name) for name in names}
        pickled = _unpickle(field, file, wanted, reading.device)
        return {name: reading.of_pickled(tensor) for name, tensor in pickled.items()}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(field, str(file), f"not a whole file of tensors: {error}") from error


def _unpickle(field: str, file: Path, wanted: Callable[[str], bool], device: str) -> dict[str, Tensor]:
    """Unpickle a state dict of tensors; code in a pickle is never run."""
    try:
        stored = torch.load(file, map_location=device, weights_only=True)
    except _NO_PICKLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(field, str(file), f"not a pickled state dict of tensors alone: {reason}") from error
    if not isinstance(stored, Mapping):
        raise ConfigError(field, str(file), f"holds a {type(stored).__name__}; accepted: tensors by name")
    chosen = {str(name): tensor for name, tensor in stored.items() if wanted(str(name))}
    for name, tensor in chosen.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(field, str(file), f"{name} is a {type(tensor).__name__}; accepted: tensors by name")
    return chosen
