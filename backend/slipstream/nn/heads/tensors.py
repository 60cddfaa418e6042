"""Published head checkpoints: safetensors or pickled state dicts -> the slots of a module. A key too few or too many is
an error that names it, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.placement import Placement
from slipstream.nn.tensor_slot import TensorSlot

_PATTERNS = ("*.safetensors", "*.bin", "*.pt")


def read_tensors(field: str, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Tensors of a folder by name, on the host. Raises ConfigError (naming `field`) if there are none."""
    if not folder.is_dir():
        raise ConfigError(field, str(folder), "no such folder")
    for pattern in _PATTERNS:
        found = {}
        for file in sorted(folder.glob(pattern)):
            found.update(_read_file(field, file, wanted))
        if found:
            return found
    raise ConfigError(field, str(folder), f"holds no tensors of such a head in {', '.join(_PATTERNS)}")


def fill(field: str, folder: Path, slots: Mapping[str, TensorSlot], tensors: Mapping[str, Tensor]) -> None:
    """Load every slot. Raises ConfigError for a tensor that is missing, not expected, or of another shape."""
    missing = [name for name, slot in slots.items() if name not in tensors and not slot.is_optional]
    unexpected = [name for name in tensors if name not in slots]
    if missing or unexpected:
        what = f"lacks {missing[0]}" if missing else f"holds {unexpected[0]}, which this head has no place for"
        raise ConfigError(field, str(folder), f"{what} ({len(missing)} missing, {len(unexpected)} unexpected)")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != slots[name].shape:
            shapes = f"{list(tensor.shape)}, expected {list(slots[name].shape)}"
            raise ConfigError(field, str(folder), f"tensor {name} has shape {shapes}: is it for this model?")
        slots[name].load(tensor)


def draw(slots: Mapping[str, TensorSlot], placement: Placement) -> None:
    """Random weights through the same slots."""
    generator = torch.Generator(placement.device).manual_seed(0)
    for slot in slots.values():
        tensor = torch.empty(slot.shape, device=placement.device, dtype=placement.dtype)
        slot.load(tensor.normal_(slot.mean, slot.std, generator=generator))


def copy_slot(tensor: Tensor, std: float = 0.02) -> TensorSlot:
    """A slot that is the tensor itself."""

    def load(stored: Tensor) -> None:
        tensor.copy_(stored)

    return TensorSlot(tuple(tensor.shape), load, std=std)


def folder_bytes(folder: Path) -> int:
    """Bytes of the head's files: what it will take, near enough for a memory plan."""
    sizes = [sum(file.stat().st_size for file in folder.glob(pattern)) for pattern in _PATTERNS]
    return next((size for size in sizes if size), 0)


def _read_file(field: str, file: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.keys() if wanted(name)]  # noqa: SIM118  (not a mapping)
                return {name: tensors.get_tensor(name) for name in names}
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(field, str(file), f"not a whole file of tensors: {error}") from error
    return {name: tensor for name, tensor in stored.items() if wanted(name)}
