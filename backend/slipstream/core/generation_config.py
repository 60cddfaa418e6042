"""Sampling defaults in a checkpoint's generation_config.json, for requests that give no value of their own.

Standard library only. Applied as vLLM does: request > config.pbtxt > generation_config.json > the setting's default.
As in vLLM, `do_sample` and `max_length` are not read. `eos_token_id` is: by the model's spec (nn/spec.py), always.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.settings import BY_NAME

FILE = "generation_config.json"
MAX_GENERATION_CONFIG_BYTES = 1 << 20
# name in the file -> setting; the parameters of config.pbtxt that come before the file
SETTINGS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
PARAMETERS = {"max_tokens": "default_max_tokens", "temperature": "default_temperature"}


def with_generation_defaults(config: EngineConfig, checkpoint: Path) -> EngineConfig:
    """The config with the defaults that the checkpoint's file has and config.pbtxt does not override."""
    if config.model.generation_config == "none":
        return config
    found = read_generation_config(checkpoint)
    for setting, parameter in PARAMETERS.items():
        if parameter in config.serving.stated:
            found.pop(setting, None)
    return replace(config, serving=replace(config.serving, generation_defaults=tuple(found.items())))


def read_generation_config(checkpoint: Path) -> dict[str, Any]:
    """Setting -> value of the file, empty if there is none. Raises ConfigError that names a field out of range."""
    path = checkpoint / FILE
    if not path.is_file():
        return {}
    size = path.stat().st_size
    if size > MAX_GENERATION_CONFIG_BYTES:
        raise ConfigError(FILE, f"{size} bytes", f"accepted: at most {MAX_GENERATION_CONFIG_BYTES} bytes")
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", str(path), f"not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("model", str(path), "must hold a JSON object")
    return {
        setting: _checked(field, setting, values[field])
        for field, setting in SETTINGS.items()
        if values.get(field) is not None
    }


def _checked(field: str, setting: str, value: object) -> Any:
    kind = BY_NAME[setting].kind
    try:
        kind.check(setting, value)
        return kind.read(setting, value)
    except RequestError as error:
        accepted = f"accepted: {kind.accepted}; or the parameter generation_config: none, which passes over the file"
        raise ConfigError(f"{FILE} {field}", value, accepted) from error
