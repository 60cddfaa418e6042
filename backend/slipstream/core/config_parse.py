"""Parses the `parameters` of a config.pbtxt, or keyword arguments of `LLM`, into an EngineConfig.

Standard library only. Reads no checkpoint; checks only that folders exist. Every refusal is a ConfigError with the
field, its value and what is accepted.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from slipstream.core.config import EngineConfig, ModelConfig, SpeculationConfig
from slipstream.core.config_checks import check_combinations, check_events
from slipstream.core.config_table import FOREIGN, PARAMETERS
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import ConfigError
from slipstream.core.numerals import read_decimal, read_whole
from slipstream.core.parameter import Parameter
from slipstream.core.pbtxt_parameters import check_given_once, config_path
from slipstream.core.replicas import read_replica
from slipstream.core.wire_messages import Config as WireConfig

_PLACEHOLDER = re.compile(r"\$\{[^}]*\}")
_TOKENS = "max_tokens_in_paged_kv_cache"  # TensorRT-LLM's cache size in tokens: num_blocks * block_size
_DEFAULTS = EngineConfig()
_BY_NAME = {name: parameter for parameter in PARAMETERS for name in (parameter.name, *parameter.aliases)}
_PATHS = ("model", "tokenizer", "lora_modules", "lora_root", "reload_root", "rank_secret_file")  # and drafters
_MODEL_PARAMETER = re.compile(r'key:\s*"model"\s*,?\s*value:?\s*\{\s*string_value:\s*"([^"]*)"')
MULTI_LORA = "multi_lora.json"
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def parse_config(received: WireConfig) -> EngineConfig:
    """Parse the CONFIG frame of the backend: Triton's model config as JSON, the model's folder and version."""
    triton = json.loads(received.config_json)
    if "sequence_batching" in triton:
        refuse_sequences()
    parameters = {name: entry.get("string_value", "") for name, entry in triton.get("parameters", {}).items()}
    model_dir, config_name = Path(received.model_dir), triton.get("model_config_name", "")  # which the backend adds
    check_given_once(config_path(model_dir, config_name), parameters)
    max_batch_size = int(triton.get("max_batch_size", 0))
    config = parse_parameters(parameters, model_dir, received.model_version, max_batch_size, config_name)
    # The backend fills in a missing policy. Without auto-complete it stays missing, which Triton takes as false.
    is_decoupled = triton.get("model_transaction_policy", {}).get("decoupled", False)
    serving = replace(config.serving, is_decoupled=is_decoupled, model_name=received.model_name)
    # The backend adds `replica` where a model has several engines.
    config = with_replica(config, triton.get("instance_group", ()), triton.get("replica", 0))
    return replace(config, serving=serving)


def refuse_sequences() -> NoReturn:
    """Triton's sequence batcher would refuse every request without a correlation id, and hold those with one back."""
    told = "a request is a whole sequence, and the engine batches without it; accepted: leave sequence_batching out"
    raise ConfigError("sequence_batching", "given", told)


def with_replica(config: EngineConfig, groups: Sequence[Mapping[str, Any]], index: int) -> EngineConfig:
    """Fill in which engine of instance_group it is. Raises ConfigError."""
    model, parallel = config.model, config.parallel
    replica = read_replica(groups, index, parallel.devices_per_node)
    if replica.num_replicas > 1 and parallel.num_nodes > 1:
        raise ConfigError("num_nodes", parallel.num_nodes, "accepted with several engines in instance_group: 1")
    if replica.num_replicas > 1 and model.lora_cache_bytes:
        reason = (
            "accepted with several engines in instance_group: 0, as only one of them would have what a client sends"
        )
        raise ConfigError("lora_cache_host_memory_bytes", model.lora_cache_bytes, reason)
    check_events(config.cache, replica.num_replicas)
    return replace(config, parallel=replace(parallel, replica=replica))


def parse_parameters(
    parameters: Mapping[str, str], model_dir: Path, version: int = 1, max_batch_size: int = 0, config_name: str = ""
) -> EngineConfig:
    """Parse parameters given as text. Paths are relative to model_dir; config_name is the server's option, with which
    another model may have another configuration than its config.pbtxt. Raises ConfigError."""
    for name, value in parameters.items():
        if _PLACEHOLDER.search(value):
            raise ConfigError(
                name, value, "an unfilled placeholder; accepted: the value itself, or leave the parameter out"
            )
    config = config_from_values(parameters, is_complete=False)
    if not 0 <= max_batch_size <= 1:
        raise ConfigError("max_batch_size", max_batch_size, "accepted: 0, or 1 for clients that send a batch dimension")
    model = replace(config.model, model=config.model.model or _version_folder(model_dir, version))
    config = _with_whole_paths(replace(config, model=model), model_dir, version, config_name)
    config = replace(config, serving=replace(config.serving, max_batch_size=max_batch_size))
    check_combinations(config)
    return config


def _with_whole_paths(config: EngineConfig, model_dir: Path, version: int = 1, config_name: str = "") -> EngineConfig:
    """The configuration with what is relative in it resolved. Raises ConfigError for what is not there."""
    model = replace(
        config.model,
        model=_resolve("model", config.model.model, model_dir),
        tokenizer=_resolve("tokenizer", config.model.tokenizer, model_dir),
        lora_modules=_adapters(config.model, model_dir, version),
        lora_root=_resolve("lora_root", config.model.lora_root, model_dir),
        logits_processor_folders=(str(model_dir / str(version)), str(model_dir)),
    )
    reload_root = _resolve("reload_root", config.serving.reload_root, model_dir)
    secret = _resolve("rank_secret_file", config.parallel.rank_secret_file, model_dir)
    return replace(
        config,
        model=model,
        parallel=replace(config.parallel, rank_secret_file=secret),
        speculation=_with_drafters(config.speculation, model_dir, config_name),
        serving=replace(config.serving, reload_root=reload_root),
    )


def with_whole_paths(parameters: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Some parameters of a model that is written elsewhere: what is relative in them counts from `folder`.

    Raises ConfigError for a wrong one, but not for combinations.
    """
    config = _with_whole_paths(config_from_values(parameters, is_complete=False), folder)
    paths = {name: value_at(config, _BY_NAME[name].path) for name in parameters if name in _BY_NAME and _is_path(name)}
    return {name: paths.get(name) or value for name, value in parameters.items()}


def _is_path(name: str) -> bool:
    return _BY_NAME[name].name in {*_PATHS, *(method.checkpoint for method in DRAFT_METHODS.values())}


def config_from_values(values: Mapping[str, object], is_complete: bool = True) -> EngineConfig:
    """Parse typed values or text, by parameter name. "" counts as absent.

    is_complete: also check required parameters. Raises ConfigError.
    """
    config = _DEFAULTS
    given: dict[str, str] = {}
    for name, value in values.items():
        parameter = _BY_NAME.get(name)
        if parameter is None:
            _refuse_foreign(name, value)
            continue
        if value is None or value == "":
            continue
        typed = _typed(parameter, name, value, parameter_default(parameter))
        if parameter.path in given and typed != value_at(config, parameter.path):
            raise ConfigError(name, value, f"differs from {given[parameter.path]}, which is the same parameter")
        given[parameter.path] = name
        config = _set(config, parameter.path, typed)
    config = _with_tokens(config, values.get(_TOKENS), given)
    config = replace(
        config, serving=replace(config.serving, stated=frozenset(_BY_NAME[name].name for name in given.values()))
    )
    if is_complete:
        check_combinations(config)
    return config


def _refuse_foreign(name: str, value: object) -> None:
    """Raises ConfigError unless this is a known foreign parameter with a value that has no effect."""
    if name == _TOKENS:
        return
    if name in FOREIGN:
        harmless, advice = FOREIGN[name]
        if str(value).lower() not in ("", *harmless):
            raise ConfigError(name, value, f"a TensorRT-LLM or vLLM parameter without meaning here; {advice}")
        return
    close = difflib.get_close_matches(name, [*_BY_NAME, _TOKENS], n=1)
    hint = f"did you mean {close[0]}?" if close else "accepted: the names in docs/configuration.md"
    raise ConfigError(name, value, f"unknown parameter; {hint}")


def _with_tokens(config: EngineConfig, value: object, given: Mapping[str, str]) -> EngineConfig:
    if value is None or value == "":
        return config
    if "cache.num_blocks" in given:
        raise ConfigError(_TOKENS, value, "given together with num_blocks; accepted: one of them")
    num_tokens = _number(_TOKENS, value, int)
    num_blocks, block_size = num_tokens // config.cache.block_size, config.cache.block_size
    if num_blocks < 1:
        raise ConfigError(_TOKENS, value, f"accepted: at least one block of block_size={block_size} tokens")
    return replace(config, cache=replace(config.cache, num_blocks=num_blocks))


# ---------------------------------------------------------------- one value


def _typed(parameter: Parameter, name: str, value: object, default: object) -> Any:
    typed: Any
    if isinstance(default, bool) or default is None:
        typed = _boolean(name, value)
    elif isinstance(default, int | float):
        typed = _number(name, value, type(default), parameter.limits)
    else:
        word = str(value).strip()
        if word in parameter.foreign:
            raise ConfigError(name, value, parameter.foreign[word])
        typed = parameter.synonyms.get(word, word)
    if parameter.accepted and typed not in parameter.accepted:
        close = difflib.get_close_matches(typed, parameter.accepted, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(name, value, f"accepted: {', '.join(parameter.accepted)}{hint}")
    if not parameter.is_good(typed):
        raise ConfigError(name, value, f"accepted: {parameter.limits}")
    return typed


def _boolean(name: str, value: object) -> bool:
    word = str(value).strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ConfigError(name, value, "accepted: true or false")
    return word in _TRUE


def _read_number(value: object, kind: type) -> Any:
    """Raises TypeError, ValueError or OverflowError for what is none."""
    if isinstance(value, str):
        return read_whole(value) if kind is int else read_decimal(value)
    if isinstance(value, bool) or (number := kind(value)) != value:
        raise ValueError(value)
    return number


def _number(name: str, value: object, kind: type, limits: str = "") -> Any:
    try:
        number = _read_number(value, kind)
        if kind is float or -(1 << 63) <= number < 1 << 63:
            return number
        limits = "an integer of 64 bits"
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(name, value, f"accepted: {limits or ('an integer' if kind is int else 'a number')}")


# ---------------------------------------------------------------- fields and paths


def value_at(config: EngineConfig, path: str) -> Any:
    """The value that a parameter of this path sets."""
    value: Any = config
    for part in path.split("."):
        value = _member(value, part)
    return value


def parameter_default(parameter: Parameter) -> Any:
    return value_at(_DEFAULTS, parameter.path)


def _member(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


def _set(holder: Any, path: str, value: Any) -> Any:
    """A copy of a configuration, or of a part of it, with one value changed."""
    name, _, rest = path.partition(".")
    changed = _set(_member(holder, name), rest, value) if rest else value
    return {**holder, name: changed} if isinstance(holder, Mapping) else replace(holder, **{name: changed})


def _version_folder(model_dir: Path, version: int) -> str:
    folder = model_dir / str(version)
    return str(folder) if (folder / "config.json").is_file() else ""


def _resolve(name: str, value: str, model_dir: Path) -> str:
    """Resolve a path relative to the model's folder; a name that is no folder there is kept as a hub id."""
    if not value or Path(value).expanduser().is_absolute():
        return value
    found = (model_dir / value).resolve()
    if found.exists():
        return str(found)
    if value.startswith(".") or value.count("/") != 1:
        kind = "file" if found.suffix == ".gguf" else "folder"
        accepted = f"accepted: a path relative to {model_dir}, or an absolute one"
        raise ConfigError(name, value, f"no such {kind}: {found}; {accepted}")
    return value


def _adapters(model: ModelConfig, model_dir: Path, version: int) -> str:
    """lora_modules, or vLLM's file, with whole paths."""
    if not model.enable_lora:
        return model.lora_modules
    text = model.lora_modules
    for folder in (model_dir, model_dir / str(version)):
        if not text and (folder / MULTI_LORA).is_file():
            text = (folder / MULTI_LORA).read_text(encoding="utf-8", errors="replace")
            if not _BY_NAME["lora_modules"].is_good(text):
                raise ConfigError("lora_modules", str(folder / MULTI_LORA), "must be a JSON object of folders by name")
    found = json.loads(text or "{}").items()
    return json.dumps({name: str((model_dir / Path(folder).expanduser()).resolve()) for name, folder in found})


def _with_drafters(speculation: SpeculationConfig, model_dir: Path, config_name: str) -> SpeculationConfig:
    """Resolve the checkpoints of the methods; one that may be a served model only if its method is loaded."""
    for method in DRAFT_METHODS.values():
        if method.checkpoint and (not method.is_model or method.name in speculation.loaded):
            name, given = method.checkpoint, speculation.checkpoint_of(method)
            if method.is_model:
                path = _resolve_served(name, given, model_dir, config_name)
            else:
                path = _resolve(name, given, model_dir)
            speculation = _set(speculation, f"options.{method.name}.{method.checkpoint}", path)
    return speculation


def _resolve_served(name: str, value: str, model_dir: Path, config_name: str) -> str:
    """Resolve a path, a hub id, or the name of another model of the repository, whose `model` is meant."""
    served = config_path(model_dir.parent / value, config_name)
    if not value or "/" in value or not served.is_file():
        return _resolve(name, value, model_dir)
    found = _MODEL_PARAMETER.search(served.read_text())
    if found is None:
        raise ConfigError(name, value, f"{served} has no parameter `model`, whose checkpoint would be the draft")
    return _resolve(name, found.group(1), model_dir.parent / value)
