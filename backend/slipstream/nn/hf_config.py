"""Typed reading of a checkpoint's config.json; an invalid field is an error that names it, before weights load.

Knows JSON and types only; the families in nn/models/ know the fields and their meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from slipstream.core.errors import ConfigError

QUANTIZATION = "quantization_config"
DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 | 4
LARGEST_INTEGER, LARGEST_NUMBER = (1 << 31) - 1, 1e30  # what int32 and float32 hold, with room for products
OLD_COMPRESSION = "compression_config"  # what compressed-tensors first called quantization_config
# files that older versions of ModelOpt, AutoGPTQ and AutoAWQ write instead: the quant_method that they do not state,
# and under which key they say the rest
QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", ""),
    "quant_config.json": ("awq", ""),
}


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ConfigError that names the file when it is absent or not a JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model", str(path), "no such file; needs a Hugging Face checkpoint folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", str(path), f"not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("model", str(path), "must hold a JSON object")
    return values


def _quantization(values: dict[str, object], checkpoint_dir: Path) -> dict[str, object]:
    """quantization_config as older tools write it, if one did."""
    compression = HFConfig("config.json", values).section(OLD_COMPRESSION)
    if compression is not None:
        return {QUANTIZATION: {"quant_method": "compressed-tensors", **compression.values}}
    file = next((name for name in QUANTIZATION_FILES if (checkpoint_dir / name).exists()), None)
    if file is None:
        return {}
    method, key = QUANTIZATION_FILES[file]
    whole = HFConfig(file, read_json(checkpoint_dir / file))
    section = whole.section(key) if key else whole
    return {QUANTIZATION: {"quant_method": method, **({} if section is None else section.values)}}


def _instead(folder: Path) -> str:
    """What a folder without config.json is instead of a checkpoint, and how to serve that."""
    if files := sorted(folder.glob("*.gguf")):
        return f"the folder has GGUF files; accepted: {files[0]}, the file itself"
    if (folder / "adapter_config.json").exists():
        return "the folder has a LoRA adapter: serve its base model, with enable_lora and lora_modules"
    return "needs a Hugging Face checkpoint folder"


@dataclass(frozen=True)
class HFConfig:
    """The fields of a config.json (or of one object inside it). A JSON null counts as absent.

    source: its name in errors: "config.json" or "config.json rope_scaling". generation: generation_config.json of its
    folder, empty if there is none. names: this file's names of fields that differ from the usual ones. parameters:
    fields that load parameters set, with the name of the parameter, which errors then give.
    """

    source: str
    values: dict[str, object]
    generation: dict[str, object] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint_dir: Path) -> HFConfig:
        if not checkpoint_dir.is_dir():
            raise ConfigError("model", str(checkpoint_dir), "no such folder")
        if not (checkpoint_dir / "config.json").exists():
            raise ConfigError("model", str(checkpoint_dir / "config.json"), f"no such file; {_instead(checkpoint_dir)}")
        generation_path = checkpoint_dir / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        values = read_json(checkpoint_dir / "config.json")
        text = values.get("text_config")
        if values.get(QUANTIZATION) is None and not (isinstance(text, dict) and text.get(QUANTIZATION)):
            values = {**values, **_quantization(values, checkpoint_dir)}
        return cls("config.json", values, generation)

    def integer(
        self, key: str, default: int | _Required = REQUIRED, minimum: int = 1, maximum: int = LARGEST_INTEGER
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"must be an integer of at least {minimum}")
        if value > maximum:
            raise self.error(key, f"must be an integer of at most {maximum}")
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(key, "must be a number above 0")
        if value > LARGEST_NUMBER:
            raise self.error(key, f"must be a number of at most {LARGEST_NUMBER:g}")
        return float(value)

    def number_or_none(self, key: str, default: float | None) -> float | None:
        """A number; null is None (unlike in other fields), absent is the default."""
        name = self.names.get(key, key)
        return default if name not in self.values else None if self.values[name] is None else self.number(key)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def boolean_or_null(self, key: str, default: bool) -> bool:
        """A boolean of a field that Hugging Face's class lets be null: that is false, unlike in other fields."""
        name = self.names.get(key, key)
        return False if name in self.values and self.values[name] is None else self.boolean(key, default)

    def count_or_null(self, key: str, default: int) -> int:
        """An integer of at least 0 of a field whose null is none, unlike in other fields; absent is the default."""
        name = self.names.get(key, key)
        return 0 if name in self.values and self.values[name] is None else self.integer(key, default, minimum=0)

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
        value = self._get(key, None) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return cast("list[str]", value)

    def integers(self, key: str) -> list[int]:
        """A list of integers of at least 0; absent is an empty one."""
        value = self._get(key, None) or []
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(key, "must be a list of integers of at least 0")
        return cast("list[int]", value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of that many numbers above 0."""
        value = self._get(key, REQUIRED)
        is_list = isinstance(value, list) and len(value) == count
        items = cast("list[float]", value if is_list else [])
        if not is_list or not all(type(item) in (int, float) and 0 < item <= LARGEST_NUMBER for item in items):
            raise self.error(key, f"must be a list of {count} numbers above 0, at most {LARGEST_NUMBER:g}")
        return tuple(float(item) for item in items)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids, merged from both config files without duplicates."""
        found: dict[int, None] = {}
        for source in (HFConfig("generation_config.json", self.generation), self):
            value = source._get(key, None)
            for item in value if isinstance(value, list) else [] if value is None else [value]:
                if isinstance(item, bool) or not isinstance(item, int):
                    raise source.error(key, "must be a token id or a list of token ids")
                found[item] = None
        return tuple(found)

    def section(self, key: str) -> HFConfig | None:
        """The object under `key`, or None when absent or empty."""
        value = self._get(key, None)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be a JSON object")
        return HFConfig(self.parameters.get(key, f"{self.source} {key}"), value, parameters=self.parameters)

    def has(self, key: str) -> bool:
        return self._get(key, None) is not None

    def renamed(self, **names: str) -> HFConfig:
        """A copy that reads fields by other names: renamed(num_hidden_layers="num_layers")."""
        return replace(self, names={**self.names, **names})

    def with_values(self, **values: object) -> HFConfig:
        """A copy with some fields set; None removes a field."""
        return replace(self, values={**self.values, **values})

    def with_parameters(self, parameters: Mapping[str, str]) -> HFConfig:
        """A copy whose errors name these fields by the load parameters that set them."""
        return replace(self, parameters=parameters)

    def with_defaults(self, **values: object) -> HFConfig:
        """A copy in which absent fields have these values."""
        return self.with_values(**{key: value for key, value in values.items() if not self.has(key)})

    def with_unstated(self, **values: object) -> HFConfig:
        """A copy in which fields that the file does not have at all have these values; a null stays one."""
        return self.with_values(**{key: value for key, value in values.items() if key not in self.values})

    def error(self, key: str, accepted: str) -> ConfigError:
        name = self.names.get(key, key)
        return ConfigError(self.parameters.get(name, f"{self.source} {name}"), self.values.get(name), accepted)

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(self.names.get(key, key))
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.error(key, "is missing")
        return default
