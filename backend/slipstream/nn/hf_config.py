"""Typed reading of a checkpoint's config.json, so that a bad field is an error that names it before any weight loads.

Knows JSON and types only; which fields exist and what they mean belongs to the families in nn/models/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from slipstream.core.errors import ConfigError

QUANTIZATION = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"  # in its place where ModelOpt wrote the checkpoint before that was agreed on


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ConfigError that names the file when it is absent or not a JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model", str(path), "no such file; needs a Hugging Face checkpoint folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError("model", str(path), f"not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("model", str(path), "must hold a JSON object")
    return values


@dataclass(frozen=True)
class HFConfig:
    """The fields of a config.json (or of one object inside it). A JSON null counts as absent."""

    source: str  # what error messages call it: "config.json" or "config.json rope_scaling"
    values: dict[str, object]
    generation: dict[str, object] = field(default_factory=dict)  # generation_config.json, empty when there is none

    @classmethod
    def read(cls, checkpoint_dir: Path) -> HFConfig:
        if not checkpoint_dir.is_dir():
            raise ConfigError("model", str(checkpoint_dir), "no such folder")
        generation_path = checkpoint_dir / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        values, beside = read_json(checkpoint_dir / "config.json"), checkpoint_dir / MODELOPT_FILE
        if values.get(QUANTIZATION) is None and beside.exists():
            section = cls(MODELOPT_FILE, read_json(beside)).section("quantization")
            values = {
                **values,
                QUANTIZATION: {"quant_method": "modelopt", **({} if section is None else section.values)},
            }
        return cls("config.json", values, generation)

    def integer(self, key: str, default: int | _Required = REQUIRED, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"must be an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(key, "must be a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def string(self, key: str, default: str | _Required = REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def choice(self, key: str, accepted: tuple[str, ...], default: str | _Required = REQUIRED) -> str:
        value = self.string(key, default)
        if value not in accepted:
            raise self.error(key, f"not supported; accepted: {', '.join(accepted)}")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; absent is an empty one."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return cast("list[str]", value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids, from both config files, each once; absent is none."""
        found: dict[int, None] = {}
        for value in (self.generation.get(key), self.values.get(key)):
            for item in value if isinstance(value, list) else [] if value is None else [value]:
                if isinstance(item, bool) or not isinstance(item, int):
                    raise self.error(key, "must be a token id or a list of token ids")
                found[item] = None
        return tuple(found)

    def section(self, key: str) -> HFConfig | None:
        """The object under `key`, or None when absent or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be a JSON object")
        return HFConfig(f"{self.source} {key}", value)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, accepted: str) -> ConfigError:
        return ConfigError(f"{self.source} {key}", self.values.get(key), accepted)

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.error(key, "is missing")
        return default
