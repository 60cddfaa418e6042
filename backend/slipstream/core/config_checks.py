"""Combinations of parameters that cannot work, whatever the checkpoint and the hardware are.

Standard library only. Looks at no file, only at whether the folders of drafters exist.
"""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, ServingConfig
from slipstream.core.config_table import MOST_PORT
from slipstream.core.draft_methods import DRAFT_METHODS, DraftMethod, NgramOptions
from slipstream.core.errors import ConfigError


def check_combinations(config: EngineConfig) -> None:
    """Raises ConfigError for values that are good alone and cannot work together."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    if not model.model and not (config.task != "generate" and model.tokenizer):
        accepted = "a checkpoint folder, a .gguf file or a Hugging Face id"
        raise ConfigError(
            "model", "", f"missing; accepted: {accepted if config.task == 'generate' else f'{accepted}, or tokenizer'}"
        )
    if config.task != "generate":
        return
    if cache.num_blocks and cache.memory_bytes:
        raise ConfigError(
            "memory_bytes",
            cache.memory_bytes,
            f"given together with num_blocks={cache.num_blocks}; accepted: one of them",
        )
    _check_drafters(config)
    _check_ngram(config)
    _check_sleep(config.serving)
    _check_nodes(config.parallel)
    check_events(config.cache, 1)
    _check_lora(config)
    if not scheduler.enable_chunked_prefill and model.max_model_len > scheduler.max_num_batched_tokens:
        limit = f"accepted with enable_chunked_prefill=false: at least max_model_len={model.max_model_len}"
        raise ConfigError("max_num_batched_tokens", scheduler.max_num_batched_tokens, limit)


def unused_options(config: EngineConfig) -> list[str]:
    """What to tell of options whose method is not loaded. No errors: methods are switched off by speculative_method
    alone. A model of the repository may be named as a draft until it is wanted."""
    speculation, told = config.speculation, []
    for method in DRAFT_METHODS.values() if config.task == "generate" else ():
        named = method.checkpoint if method.is_model else ""
        for parameter in method.parameters if method.name not in speculation.loaded else ():
            value = getattr(speculation.options[method.name], parameter.name)
            if parameter.name != named and value != getattr(method.options(), parameter.name):
                told.append(f"{parameter.name}={value!r} has no effect: speculative_method does not name {method.name}")
    return told


def _check_nodes(parallel: ParallelConfig) -> None:
    size, num_nodes = parallel.num_ranks, parallel.num_nodes
    if num_nodes == 1:
        return
    if size % num_nodes:
        raise ConfigError("num_nodes", num_nodes, f"accepted: 1, or what divides the {size} ranks of the model")
    if not parallel.rank_secret_file:
        raise ConfigError("rank_secret_file", "", "missing; accepted with several nodes: a file that all of them have")


def check_events(cache: CacheConfig, num_engines: int) -> None:
    """Raises ConfigError. The engines of a model publish at ports one after the other, from each endpoint's on."""
    name, given, replay = "kv_events_replay_endpoint", cache.events_endpoint, cache.events_replay_endpoint
    if replay and not given:
        raise ConfigError(name, replay, "accepted with kv_events_endpoint")
    if cache.events_topic and not given:
        raise ConfigError("kv_events_topic", cache.events_topic, "accepted with kv_events_endpoint")
    if given and not cache.enable_prefix_caching:
        raise ConfigError(
            "kv_events_endpoint", given, "accepted with enable_prefix_caching, whose blocks the events name"
        )
    if replay and replay == given:
        raise ConfigError(name, replay, "accepted: another than kv_events_endpoint")
    (host, _, port), (replay_host, _, replay_port) = given.rpartition(":"), replay.rpartition(":")
    ports = [int(one) for one in (port, replay_port) if one.isdecimal()]
    if ports and max(ports) + num_engines - 1 > MOST_PORT:
        accepted = f"accepted with {num_engines} engines: ports up to {MOST_PORT - num_engines + 1}"
        raise ConfigError("kv_events_endpoint" if port == str(max(ports)) else name, max(ports), accepted)
    if host == replay_host and len(ports) == 2 and abs(ports[0] - ports[1]) < num_engines:
        accepted = f"accepted with {num_engines} engines: a port at least {num_engines} from kv_events_endpoint's"
        raise ConfigError(name, replay, accepted)


def _check_lora(config: EngineConfig) -> None:
    model, parallel = config.model, config.parallel
    if not model.enable_lora:
        for name, (value, default) in _lora_values(model).items():
            if value != default:
                raise ConfigError(name, value, "accepted with enable_lora=true")
    elif parallel.num_nodes > 1:
        raise ConfigError("enable_lora", True, f"accepted with num_nodes=1, not {parallel.num_nodes}")
    elif model.deterministic:
        raise ConfigError("enable_lora", True, "accepted without deterministic: adapters have no such kernels")
    elif len(json.loads(model.lora_modules or "{}")) > model.max_cpu_loras:
        raise ConfigError("lora_modules", model.lora_modules, f"accepted: at most max_cpu_loras={model.max_cpu_loras}")


def _lora_values(model: ModelConfig) -> dict[str, tuple[object, object]]:
    """Value and default of each parameter that means something with enable_lora alone."""
    default, others = ModelConfig(), ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules", "lora_root")
    values: dict[str, tuple[object, object]] = {name: (getattr(model, name), getattr(default, name)) for name in others}
    return {**values, "lora_cache_host_memory_bytes": (model.lora_cache_bytes, default.lora_cache_bytes)}


def _check_ngram(config: EngineConfig) -> None:
    """A short ngram_max alone lowers the default of ngram_min; only one that is stated can contradict it."""
    options = config.speculation.options_of(NgramOptions)
    if "ngram_min" in config.serving.stated and options.ngram_min > options.ngram_max:
        raise ConfigError("ngram_min", options.ngram_min, f"accepted: at most ngram_max={options.ngram_max}")


def _check_sleep(serving: ServingConfig) -> None:
    """What belongs to a model that may sleep would be without effect on one that may not."""
    values = {"wake_on_request": serving.wake_on_request, "reload_root": serving.reload_root}
    for name, value in values.items():
        if value and not serving.enable_sleep_mode:
            raise ConfigError(name, value, "accepted with enable_sleep_mode=true")


def _check_drafters(config: EngineConfig) -> None:
    if config.model.load_format in ("dummy", "null"):
        return
    for method in DRAFT_METHODS.values():
        if method.name in config.speculation.loaded and method.checkpoint and not method.is_in_model:
            _check_checkpoint(method, config.speculation.checkpoint_of(method))


def _check_checkpoint(method: DraftMethod, value: str) -> None:
    if not value:
        raise method.missing()
    folder = Path(value).expanduser()
    if folder.is_absolute() and not folder.exists():
        raise ConfigError(method.checkpoint, value, "no such folder")
