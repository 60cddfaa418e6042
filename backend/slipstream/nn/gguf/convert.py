"""Write a GGUF file once as a checkpoint folder: config.json, safetensors, tokenizer.json.

Tensors are dequantised one at a time, so the host holds one shard and one tensor.  The container and the formats of
its blocks (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5, K quants) are read by the package `gguf`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.core.errors import ConfigError
from slipstream.nn.convert.output import new_folder, write_json, write_shards
from slipstream.nn.gguf.metadata import FIELD, ROPE_FACTORS, Metadata, config_json, heads_of_pairs, hf_name
from slipstream.nn.gguf.tokenizer import write_tokenizer

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def convert(file: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Write `file` into `folder`, which must not exist or be empty; it appears whole or not at all.

    Raises ConfigError for a file that is no GGUF file, an unknown architecture, tensor or tokenizer.
    """
    values, tensors = _read(file)
    metadata = Metadata(str(file), values)
    factors = _rope_factors(tensors)
    config = {**config_json(metadata, tensors, factors), "dtype": dtype}
    with new_folder(folder) as built:
        write_tokenizer(metadata, built)
        write_json(built / "config.json", config)
        stored = [tensor for name, tensor in tensors.items() if name != ROPE_FACTORS]
        write_shards(
            ((hf_name(tensor.name, metadata), _dequantised(tensor, metadata, DTYPES[dtype])) for tensor in stored),
            built,
        )


def converted(file: Path) -> Path:
    """The folder of a GGUF file in the user's cache, converted when it is not there yet or the file has changed."""
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "slipstream" / "gguf"
    folder = cache / f"{file.stem}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{folder.name}.lock").open("w") as lock:  # the models of one server load at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            logger.info("converting %s into %s, once", file, folder)
            convert(file, folder)
    return folder


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        from slipstream.nn.gguf.reader import read_gguf
    except ImportError as error:
        raise ConfigError(FIELD, str(file), "reading GGUF files needs the package gguf (pip install gguf)") from error
    return read_gguf(file)


def _rope_factors(tensors: dict[str, Any]) -> list[float] | None:
    return tensors[ROPE_FACTORS].data.astype(np.float32).tolist() if ROPE_FACTORS in tensors else None


def _dequantised(tensor: Any, metadata: Metadata, dtype: torch.dtype) -> torch.Tensor:
    from gguf.quants import dequantize

    try:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    except (NotImplementedError, ValueError) as error:
        kind = tensor.tensor_type.name
        raise metadata.error(f"tensor {tensor.name} is stored as {kind}, which cannot be read: {error}") from error
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    if (num_heads := heads_of_pairs(tensor.name, metadata)) is not None:
        if num_heads < 1 or len(values) % (2 * num_heads):
            raise metadata.error(f"tensor {tensor.name} has {len(values)} rows, which are no {num_heads} heads")
        values = _rows_of_halves(values, num_heads)
    return values.to(dtype).contiguous()


def _rows_of_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows stored so that rotation turns neighbours (x0, x1) -> rows for rotation of halves (x0, x_half)."""
    half = rows.shape[0] // num_heads // 2
    return rows.view(num_heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
