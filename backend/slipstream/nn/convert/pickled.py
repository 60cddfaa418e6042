"""PyTorch's pickled weights (`pytorch_model*.bin`): tensors alone, read without running what the file asks to run.

torch.load with weights_only refuses any other object. Before it, the archive's sizes are checked: nothing in it may be
compressed, so what is unpacked is never more than the file.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import ConfigError
from slipstream.nn.convert.output import read_json_if_there

INDEX_FILE, SINGLE_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
MAX_PICKLE_BYTES = 64 << 20  # of the names and shapes in a file; of a file of Llama-70B: 20 kB
MAX_ENTRIES = 1 << 20
MAX_SHARING = 2  # tensors of a file together, in times of its size: tied ones are stored once
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


def pickled_files(folder: Path) -> list[Path]:
    """The pickled files of a checkpoint, empty if it has none. Raises ConfigError if one of its index is missing."""
    weight_map = read_json_if_there(folder / INDEX_FILE).get("weight_map")
    if weight_map is None:
        single = folder / SINGLE_FILE
        return [single] if single.is_file() else []
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError("model", str(folder / INDEX_FILE), "must hold a weight_map of tensor names to file names")
    names = sorted(set(weight_map.values()))
    wrong = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if wrong:
        raise ConfigError("model", str(folder), f"shards of {INDEX_FILE} are missing: {', '.join(wrong[:3])}")
    return [folder / name for name in names]


def read_pickled(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, each with memory of its own. Raises ConfigError that names the file and what is wrong with it."""
    seen: dict[str, Path] = {}
    for file in files:
        for name, tensor in _load(file).items():
            if name in seen:
                raise ConfigError("model", str(file), f"tensor {name} is in {seen[name].name} as well")
            seen[name] = file
            yield name, tensor.clone(memory_format=torch.contiguous_format)


def _load(file: Path) -> dict[str, torch.Tensor]:
    _check_archive(file)
    try:
        state: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, EOFError, KeyError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = next(
            (line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line), lines[0] if lines else ""
        )
        reason = f"holds something else than tensors, or is damaged: {told[:300]}; accepted: a state dict of tensors"
        raise ConfigError("model", str(file), reason) from error
    if isinstance(state, dict) and set(state) == {"state_dict"}:
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ConfigError("model", str(file), f"holds a {type(state).__name__}; accepted: a state dict of tensors")
    _check_tensors(state, file)
    return state


def _check_archive(file: Path) -> None:
    size = file.stat().st_size
    if not zipfile.is_zipfile(file):
        raise ConfigError("model", str(file), "not an archive of torch.save (1.6 or newer); save it again with that")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ConfigError("model", str(file), f"a damaged archive: {error}") from error
    if len(entries) > MAX_ENTRIES:
        raise ConfigError("model", str(file), f"has {len(entries)} entries; accepted: at most {MAX_ENTRIES}")
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    total = sum(entry.file_size for entry in entries)
    if packed or total > size:
        reason = f"would unpack to {total} bytes from {size}; accepted: an archive that is not compressed"
        raise ConfigError("model", str(file), reason)
    pickles = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    if pickles > MAX_PICKLE_BYTES:
        raise ConfigError("model", str(file), f"names and shapes take {pickles} bytes; accepted: {MAX_PICKLE_BYTES}")


def _check_tensors(state: dict[Any, Any], file: Path) -> None:
    total, limit = 0, MAX_SHARING * file.stat().st_size
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise ConfigError("model", str(file), f"{str(name)[:100]} is a {kind}; accepted: tensors by name")
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or tensor.is_quantized:
            raise ConfigError("model", str(file), f"tensor {name[:100]} is {tensor.dtype}; accepted: plain numbers")
        num_bytes = tensor.numel() * tensor.element_size()
        total += num_bytes
        if num_bytes > tensor.untyped_storage().nbytes() or total > limit:
            raise ConfigError("model", str(file), f"tensor {name[:100]} is larger than what the file stores of it")
