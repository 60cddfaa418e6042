"""Reads an adapter of PEFT: adapter_config.json and adapter_model.safetensors -> what each module gains.

Everything is checked against the model's modules before a tensor is read. Source: PEFT's file format, arXiv:2106.09685;
rslora: arXiv:2312.03732.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.core.errors import ConfigError
from slipstream.nn.adapter_alphas import DEFAULT_ALPHA, alphas_of, are_patterns, is_number
from slipstream.nn.convert.output import check_size
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
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Ways to begin, by which PEFT takes a part out of the base model, again where the adapter is loaded.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
MAX_CONFIG_BYTES = 1 << 20  # of adapter_config.json; one that names all modules of Llama-70B has 90 kB


@dataclass(frozen=True)
class AdapterModel:
    """What an adapter must fit: the modules that it may change, their names' family, the rank of a slot."""

    targets: Mapping[str, LoraTarget]
    family: Family
    max_rank: int


def read_adapter(folder: Path, model: AdapterModel, dtype: torch.dtype) -> dict[str, LoraPair]:
    """Pairs by module, on the host in `dtype`, b with the scale in it. Raises ConfigError naming what is wrong."""
    with _opened(folder, model) as (config, tensors, pairs):
        read = {}
        alphas = _alphas(folder, config, pairs)
        for (module, (name_a, name_b)), alpha in zip(pairs.items(), alphas):
            a, b = tensors.get_tensor(name_a).float(), tensors.get_tensor(name_b).float()
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            read[module] = finite_pair(module, a.to(dtype), (b * scale).to(dtype))
        return read


def ranks_of(folder: Path, model: AdapterModel) -> dict[str, int]:
    """The rank of each module. Reads headers alone; does not look for numbers that are not finite.

    Raises what else read_adapter raises."""
    with _opened(folder, model) as (config, tensors, pairs):
        _alphas(folder, config, pairs)
        return {module: tensors.get_slice(name_a).get_shape()[0] for module, (name_a, _) in pairs.items()}


@contextmanager
def _opened(folder: Path, model: AdapterModel) -> Iterator[tuple[dict[str, Any], Any, dict[str, tuple[str, str]]]]:
    """(adapter_config.json, the tensors, names of A and B by module), checked. Raises ConfigError."""
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(FIELD, str(folder), f"has no {CONFIG_FILE}; accepted: a folder that PEFT has saved")
    try:
        check_size(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
        config = read_json(folder / CONFIG_FILE)
    except ConfigError as error:
        raise ConfigError(FIELD, str(folder / CONFIG_FILE), error.accepted) from error
    _check_config(config, folder)
    file = folder / TENSOR_FILE
    if not file.is_file():
        raise ConfigError(FIELD, str(folder), f"has no {TENSOR_FILE}; pickled weights are not read")
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
            headers = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
            yield config, tensors, _pairs_of(headers, model, file)
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
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        reason = (
            "it belongs to a base model that PEFT has changed; accepted: an adapter that PEFT has converted to LoRA"
        )
        raise ConfigError(FIELD, str(folder), f"init_lora_weights={start!r} of {CONFIG_FILE}: {reason}")
    if not isinstance(config.get("use_rslora"), bool | NoneType):
        raise ConfigError(FIELD, str(folder), f"use_rslora of {CONFIG_FILE} must be true or false")
    if not isinstance(config.get("r", 8), int) or not is_number(config.get("lora_alpha", DEFAULT_ALPHA)):
        raise ConfigError(FIELD, str(folder), f"r and lora_alpha of {CONFIG_FILE} must be numbers")
    if not are_patterns(config.get("alpha_pattern") or {}):
        raise ConfigError(FIELD, str(folder), f"alpha_pattern of {CONFIG_FILE} must hold numbers by pattern")


def _alphas(folder: Path, config: Mapping[str, Any], pairs: Mapping[str, tuple[str, str]]) -> list[float]:
    """lora_alpha of each pair's module, by the name that PEFT gave it. Raises ConfigError."""
    names = [_NAME.sub(r"\1", name_a).removeprefix(_PREFIX) for name_a, _ in pairs.values()]
    try:
        return alphas_of(config, names)
    except ValueError as error:
        raise ConfigError(FIELD, str(folder), f"alpha_pattern of {CONFIG_FILE} {error}") from None


def _pairs_of(
    headers: Mapping[str, tuple[tuple[int, ...], str]], model: AdapterModel, file: Path
) -> dict[str, tuple[str, str]]:
    """Module -> names of its A and B in the file. Raises ConfigError for what the model cannot take."""
    found: dict[str, dict[str, str]] = {}
    for name in headers:
        match = _NAME.fullmatch(name)
        module = "" if match is None else model.family.read_as(match[1].removeprefix(_PREFIX))
        if match is None or module not in model.targets:
            of_model = ", ".join(sorted({target.rpartition(".")[2] for target in model.targets}))
            raise ConfigError(
                FIELD, str(file), f"{name} is of no module that adapters may change; accepted: {of_model}"
            )
        pair = found.setdefault(module, {})
        if match[2] in pair:
            reason = f"holds {pair[match[2]]} and {name}, which are of one module; accepted: one of them"
            raise ConfigError(FIELD, str(file), reason)
        pair[match[2]] = name
    if not found:
        raise ConfigError(FIELD, str(file), "holds no tensors")
    for module, pair in found.items():
        if len(pair) < 2:
            raise ConfigError(FIELD, str(file), f"{module} has lora_{next(iter(pair))} alone; accepted: A and B")
        (shape_a, type_a), (shape_b, type_b) = headers[pair["A"]], headers[pair["B"]]
        target, rank = model.targets[module], shape_a[0] if shape_a else 0
        expected = (rank, target.in_features), (target.out_features, rank)
        if (shape_a, shape_b) != expected:
            shapes = (
                f"{list(shape_a)} and {list(shape_b)}, the model implies {list(expected[0])} and {list(expected[1])}"
            )
            raise ConfigError(FIELD, str(file), f"A and B of {module} have shapes {shapes}")
        if not 0 < rank <= model.max_rank:
            limit = f"accepted: 1 to max_lora_rank={model.max_rank}"
            raise ConfigError(FIELD, str(file), f"{module} has rank {rank}; {limit}")
        if not {type_a, type_b} <= set(_FLOATS):
            raise ConfigError(
                FIELD, str(file), f"{module} has types {type_a}, {type_b}; accepted: {', '.join(_FLOATS)}"
            )
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}
