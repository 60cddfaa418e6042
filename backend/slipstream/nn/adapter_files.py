"""Reads an adapter of PEFT: adapter_config.json and adapter_model.safetensors -> what each module gains.

Everything is checked against the model's modules before a tensor is read. Source: PEFT's file format, arXiv:2106.09685;
rslora: arXiv:2312.03732.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.core.errors import ConfigError
from slipstream.nn.hf_config import read_json
from slipstream.nn.lora import LoraPair, LoraTarget
from slipstream.nn.models.family import Family

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
FIELD = "lora_modules"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_(A|B)(?:\.default)?\.weight")
_FLOATS = ("F32", "F16", "BF16")
# Fields that change what is computed -> values without effect.
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
}


def read_adapter(
    folder: Path, targets: Mapping[str, LoraTarget], family: Family, max_rank: int, dtype: torch.dtype
) -> dict[str, LoraPair]:
    """Pairs by module, on the host in `dtype`, b with the scale in it. Raises ConfigError naming what is wrong."""
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(FIELD, str(folder), f"has no {CONFIG_FILE}; accepted: a folder that PEFT has saved")
    config = read_json(folder / CONFIG_FILE)
    _check_config(config, folder)
    file = folder / TENSOR_FILE
    if not file.is_file():
        raise ConfigError(FIELD, str(folder), f"has no {TENSOR_FILE}; pickled weights are not read")
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
            headers = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
            read = {}
            for module, names in _pairs_of(headers, targets, family, max_rank, file).items():
                a, b = (tensors.get_tensor(name).float() for name in names)
                scale = _scale(config, _NAME.sub(r"\1", names[0]).removeprefix(_PREFIX), len(a))
                read[module] = finite_pair(module, a.to(dtype), (b * scale).to(dtype))
            return read
    except (SafetensorError, OSError) as error:
        raise ConfigError(FIELD, str(file), f"not a whole safetensors file: {error}") from error


def finite_pair(module: str, a: torch.Tensor, b: torch.Tensor) -> LoraPair:
    """Infinity times the zero of a row without the adapter would be no number. Raises ConfigError."""
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ConfigError(FIELD, module, f"holds NaN, infinity or numbers beyond {str(a.dtype).removeprefix('torch.')}")
    return LoraPair(a, b)


def _check_config(config: Mapping[str, object], folder: Path) -> None:
    for name, accepted in _WITHOUT_EFFECT.items():
        value = config.get(name)
        if value not in accepted and not (name == "peft_type" and value is None):
            raise ConfigError(FIELD, str(folder), f"{name}={value!r} of {CONFIG_FILE} is not served")
    if not isinstance(config.get("r", 8), int) or not isinstance(config.get("lora_alpha", 8), int | float):
        raise ConfigError(FIELD, str(folder), f"r and lora_alpha of {CONFIG_FILE} must be numbers")


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """PEFT's factor of a module; its patterns match the end of a name."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    found = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?(?:{key})", module))
    alpha = float(next(found, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs_of(
    headers: Mapping[str, tuple[tuple[int, ...], str]],
    targets: Mapping[str, LoraTarget],
    family: Family,
    max_rank: int,
    file: Path,
) -> dict[str, tuple[str, str]]:
    """Module -> names of its A and B in the file. Raises ConfigError for what the model cannot take."""
    found: dict[str, dict[str, str]] = {}
    for name in headers:
        match = _NAME.fullmatch(name)
        module = "" if match is None else family.read_as(match[1].removeprefix(_PREFIX))
        if match is None or module not in targets:
            of_model = ", ".join(sorted({target.rpartition(".")[2] for target in targets}))
            raise ConfigError(
                FIELD, str(file), f"{name} is of no module that adapters may change; accepted: {of_model}"
            )
        found.setdefault(module, {})[match[2]] = name
    if not found:
        raise ConfigError(FIELD, str(file), "holds no tensors")
    for module, pair in found.items():
        if len(pair) < 2:
            raise ConfigError(FIELD, str(file), f"{module} has lora_{next(iter(pair))} alone; accepted: A and B")
        (shape_a, type_a), (shape_b, type_b) = headers[pair["A"]], headers[pair["B"]]
        target, rank = targets[module], shape_a[0] if shape_a else 0
        expected = (rank, target.in_features), (target.out_features, rank)
        if (shape_a, shape_b) != expected:
            shapes = (
                f"{list(shape_a)} and {list(shape_b)}, the model implies {list(expected[0])} and {list(expected[1])}"
            )
            raise ConfigError(FIELD, str(file), f"A and B of {module} have shapes {shapes}")
        if not 0 < rank <= max_rank:
            raise ConfigError(FIELD, str(file), f"{module} has rank {rank}; accepted: 1 to max_lora_rank={max_rank}")
        if not {type_a, type_b} <= set(_FLOATS):
            raise ConfigError(
                FIELD, str(file), f"{module} has types {type_a}, {type_b}; accepted: {', '.join(_FLOATS)}"
            )
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}
