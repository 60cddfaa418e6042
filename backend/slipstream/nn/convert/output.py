"""The folder that a conversion writes: whole or not at all, tensors in shards with an index."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slipstream.core.errors import ConfigError
from slipstream.nn.tensor_file import write_tensors

SHARD_BYTES = 2 << 30
JSON_BYTES = 64 << 20  # the index of the largest published model has a sixth of it


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` when the block ends. Raises ConfigError if `folder` has files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("output", str(folder), "not empty, or no folder; accepted: a new or an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        built = Path(scratch) / "checkpoint"
        built.mkdir()
        yield built
        if folder.exists():
            folder.rmdir()
        os.replace(built, folder)


def write_shards(named: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Files of at most SHARD_BYTES (or one tensor) and their index; one of them is in memory at a time."""
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    num_bytes = total = 0

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        write_tensors(shard, folder / name)
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if shard and num_bytes + size > SHARD_BYTES:
            flush()
            num_bytes = 0
        shard[name] = tensor
        num_bytes += size
        total += size
    flush()
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json_if_there(path: Path) -> dict[str, object]:
    """A JSON object, empty if there is no such file. Raises ConfigError for other files and for large ones."""
    if not path.is_file():
        return {}
    check_size(path, JSON_BYTES)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", str(path), f"not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("model", str(path), "must hold a JSON object")
    return values


def check_size(path: Path, limit: int) -> None:
    """Raises ConfigError for a file that is larger than what is read whole into memory."""
    size = path.stat().st_size
    if size > limit:
        raise ConfigError("model", str(path), f"has {size} bytes; accepted: at most {limit}")
