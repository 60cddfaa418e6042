"""A checkpoint folder without safetensors or tokenizer.json -> a folder with both, which `model` can name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.nn.checkpoint_path import copy_templates
from slipstream.nn.convert.output import new_folder, read_json_if_there, write_json, write_shards
from slipstream.nn.convert.pickled import pickled_files, read_pickled
from slipstream.nn.convert.tokenizer import convert_tokenizer, has_tokenizer_to_convert
from slipstream.nn.hf_config import QUANTIZATION_FILES

_COPIED = ("generation_config.json", "chat_template.json", "preprocessor_config.json", *QUANTIZATION_FILES)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def convert_folder(folder: Path, output: Path) -> None:
    """Write `output`, which must not exist or be empty; it appears whole or not at all.

    Safetensors are linked (copied to another file system). Raises ConfigError that names what cannot be converted.
    """
    weights = sorted(folder.glob("*.safetensors"))
    pickled = [] if weights else pickled_files(folder)
    has_tokenizer = has_tokenizer_to_convert(folder)
    config = read_json_if_there(folder / "config.json")
    if not pickled and not has_tokenizer:
        accepted = "pytorch_model.bin, or tokenizer.model, tiktoken.model or *.tiktoken without tokenizer.json"
        raise ConfigError("model", str(folder), f"nothing to convert in it; accepted: a folder with {accepted}")
    if config and not weights and not pickled:
        accepted = "*.safetensors, pytorch_model.bin or pytorch_model.bin.index.json with its files"
        raise ConfigError("model", str(folder), f"has a config.json and no weights; accepted: {accepted}")
    with new_folder(output) as built:
        if has_tokenizer:
            convert_tokenizer(folder, built)
        else:
            _link(built, [folder / name for name in _TOKENIZER_FILES])
        if config:
            write_json(built / "config.json", {key: value for key, value in config.items() if key != "auto_map"})
        index = [folder / "model.safetensors.index.json"] if weights else []
        _link(built, [*weights, *index, *(folder / name for name in _COPIED), *folder.glob("*.jinja")])
        copy_templates(folder, built)
        if pickled:
            write_shards(read_pickled(pickled), built)


def _link(built: Path, files: list[Path]) -> None:
    for file in files:
        if not file.is_file():
            continue
        try:
            os.link(file.resolve(), built / file.name)
        except OSError:  # another file system
            shutil.copyfile(file, built / file.name)
