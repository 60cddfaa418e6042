"""read_spec: the description of a checkpoint folder, by the family of its architecture. Reads no weights.

It reads the headers of weight files for a dtype that config.json does not state.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from slipstream.nn.hf_config import DTYPE_KEYS, HFConfig, read_json
from slipstream.nn.models import family_of
from slipstream.nn.models.family import Family
from slipstream.nn.models.plain_parts import with_plain_parts
from slipstream.nn.models.rope_scaling import read_scaled_spec
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.spec_refusals import check_served
from slipstream.nn.stored_names import tensor_name
from slipstream.nn.weights import INDEX_FILE, files_without_index, read_headers

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_spec(checkpoint_dir: str | Path, rope_scaling: str = "") -> DecoderSpec:
    """The spec of a checkpoint folder in Hugging Face layout. Reads config.json and generation_config.json, and the
    header of one weight file if config.json states no dtype.

    rope_scaling: JSON, instead of the checkpoint's; "" = the checkpoint's.
    Raises ConfigError for a folder without a readable config.json, an unsupported architecture (listing the supported
    ones) and every field that this decoder does not implement.
    """
    folder = Path(checkpoint_dir)
    config = HFConfig.read(folder)
    family = family_of(config)
    read = family.read_spec
    spec = read_scaled_spec(read, config, rope_scaling) if rope_scaling else read(config)
    check_served(spec)
    spec = with_plain_parts(config, family.names_of(spec), spec)
    if _states_dtype(config):
        return spec
    return replace(spec, dtype=_stored_dtype(folder, family, spec) or spec.dtype)


def _states_dtype(config: HFConfig) -> bool:
    """Whether config.json says the dtype, of the whole or of the text model within it."""
    places = (config, config.section("text_config"))
    return any(place is not None and any(map(place.has, DTYPE_KEYS)) for place in places)


def _stored_dtype(checkpoint_dir: Path, family: Family, spec: DecoderSpec) -> torch.dtype | None:
    """That of the embedding, which no format quantises; scales and the biases of routers may be of a wider one.

    None if the folder has no such tensor: a load says so, unless weights are dummies.
    Raises ConfigError for a file that is not whole.
    """
    embedding = f"{tensor_name(family.names_of(spec), 'embedding', 0)}.weight"
    files = _files_with(checkpoint_dir, family, embedding)
    headers = {family.read_as(name): header for name, header in read_headers(files).items()}
    return DTYPES.get(headers[embedding].dtype) if embedding in headers else None


def _files_with(checkpoint_dir: Path, family: Family, tensor: str) -> list[Path]:
    """The one that an index names for the tensor, if it is there; without an index, all that may hold it."""
    index = checkpoint_dir / INDEX_FILE
    if not index.exists():
        return files_without_index(checkpoint_dir)
    weight_map = read_json(index).get("weight_map")
    files = weight_map if isinstance(weight_map, dict) else {}
    name = next((file for stored, file in files.items() if family.read_as(stored) == tensor), None)
    # a file beyond the folder is refused by a load
    file = checkpoint_dir / name if isinstance(name, str) and Path(name).name == name else None
    return [file] if file is not None and file.is_file() else []
