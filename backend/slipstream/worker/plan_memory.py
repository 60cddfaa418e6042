"""plan_memory: how many KV blocks fit beside weights and workspace, worked out before any weight is read.

Runs once at load on the engine thread. Pure arithmetic, but for the memory of the host that lies behind the pool.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slipstream.core.config import CacheConfig, EngineConfig, SchedulerConfig
from slipstream.core.errors import ConfigError
from slipstream.core.host_memory import host_memory
from slipstream.core.kv_groups import ONE_GROUP, KVGroups
from slipstream.nn.kv_layout import KVLayout
from slipstream.nn.load import weight_bytes
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.draft_memory import draft_memory
from slipstream.worker.hardware import Hardware
from slipstream.worker.kv_groups import plan_groups
from slipstream.worker.kv_offload import buffer_bytes
from slipstream.worker.memory_plan import MemoryPlan, StageMemory, size_text
from slipstream.worker.workspace import workspace_bytes

DEFAULT_CPU_POOL_BYTES = 1 << 30
CPU_SHARE_OF_FREE = 0.5  # a development machine has other things to do with its memory


def resolve_max_model_len(config: EngineConfig, spec: DecoderSpec) -> int:
    """The configured length, or the checkpoint's. Raises ConfigError if the checkpoint cannot go that far, or if a step
    that must take a prompt whole cannot."""
    asked, limit = config.model.max_model_len, spec.max_model_len
    if asked > limit:
        raise ConfigError("max_model_len", asked, f"accepted: at most {limit}, which the checkpoint is made for")
    resolved, budget = asked or limit, config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and resolved > budget:
        whose = "" if asked else ", the checkpoint's"
        accepted = f"at least max_model_len={resolved}{whose}; or max_model_len at most {budget}"
        raise ConfigError("max_num_batched_tokens", budget, f"accepted with enable_chunked_prefill=false: {accepted}")
    return resolved


def plan_memory(spec: DecoderSpec, config: EngineConfig, hardware: Hardware, free_bytes: int) -> MemoryPlan:
    """Size the KV pool for a checkpoint. free_bytes: of several ranks, where least is free.

    Raises ConfigError, with the arithmetic, if one sequence would not fit."""
    parallel = hardware.parallel
    of_stages = [replace(parallel, stage=stage) for stage in range(parallel.num_stages)]
    plans = [_plan_stage(spec, config, replace(hardware, parallel=one), free_bytes) for one in of_stages]
    tightest = min(range(len(plans)), key=lambda stage: plans[stage].num_blocks)
    plan = plans[tightest]
    if config.model.load_format != "null":
        num_bytes = parallel.size * sum(one.block_bytes for one in plans)
        plan = replace(plan, num_host_blocks=_num_host_blocks(config.cache, num_bytes))
    if len(plans) == 1:
        return plan
    layers = [one.own_layers(spec.num_layers) for one in of_stages]
    memory = [
        StageMemory(own, one.weight_bytes, one.workspace_bytes, one.bytes_per_block, one.draft_block_bytes)
        for own, one in zip(layers, plans)
    ]
    return replace(plan, stages=tuple(memory), stage=tightest)


def _plan_stage(spec: DecoderSpec, config: EngineConfig, hardware: Hardware, free_bytes: int) -> MemoryPlan:
    """The plan of one stage, without what lies behind its pool."""
    is_null = config.model.load_format == "null"
    max_model_len = resolve_max_model_len(config, spec)
    held_bytes = 0 if is_null else weight_bytes(config.model, spec, hardware.dtype, hardware.parallel)
    own = spec.of_rank(hardware.parallel)
    groups, full_hold_reason = plan_groups(own, config, hardware.device, hardware.kv_dtype, max_model_len)
    block_bytes = _block_bytes(own, config, hardware, groups)
    drafting = draft_memory(config, spec, hardware)
    draft_block_bytes = drafting.kv_bytes_per_token * config.cache.block_size
    held_bytes += drafting.weight_bytes
    beside_bytes = 0 if is_null else workspace_bytes(spec, config, hardware, groups.num_groups)
    if config.cache.host_memory_bytes and hardware.device.type == "cuda" and not is_null:
        beside_bytes += buffer_bytes(block_bytes)
    budget = _pool_budget(config.cache, free_bytes - held_bytes - beside_bytes, hardware.device)
    blocks_per_sequence = groups.max_blocks(max_model_len, config.cache.block_size)
    num_blocks = config.cache.num_blocks
    if not num_blocks:
        enough = 2 * config.scheduler.max_num_seqs * blocks_per_sequence  # every sequence, and as much prefix cache
        num_blocks = enough if is_null else min(budget // (block_bytes + draft_block_bytes), enough)
    plan = MemoryPlan(
        free_bytes=free_bytes,
        weight_bytes=held_bytes,
        workspace_bytes=beside_bytes,
        block_bytes=0 if is_null else block_bytes,
        block_size=config.cache.block_size,
        num_blocks=max(0, num_blocks),
        max_model_len=max_model_len,
        draft_block_bytes=draft_block_bytes,
        groups=groups,
        full_hold_reason=full_hold_reason,
    )
    if not is_null:
        _check_memory_bytes(plan, config.cache)
    _check(plan, config.cache, budget, blocks_per_sequence, config.scheduler.max_num_batched_tokens)
    return plan


def _block_bytes(own: DecoderSpec, config: EngineConfig, hardware: Hardware, groups: KVGroups) -> int:
    """own: with all layers. groups: of all layers."""
    layers = hardware.parallel.own_layers(own.num_layers)
    of_stage, groups = own.of_stage(hardware.parallel), groups.within(layers)
    return cache_bytes_per_token(of_stage, hardware.kv_dtype, groups) * config.cache.block_size


def cache_bytes_per_token(spec: DecoderSpec, kv_dtype: torch.dtype, groups: KVGroups = ONE_GROUP) -> int:
    """Cache bytes of one token in a group's layers, unused parts included. Raises ConfigError for layers that keep
    anything but a row per token."""
    layouts = [layer.attention.kv_layout(kv_dtype) for layer in spec.layers]
    for layout in layouts:
        check_planes(spec.architecture, layout)
    if groups.num_groups == 1:
        return spec.kv_bytes_per_token(kv_dtype)
    return groups.num_parts * layouts[0].bytes_per_token


def check_planes(architecture: str, layout: KVLayout) -> None:
    for plane in layout.planes:
        if plane.per_request:
            raise ConfigError(
                "model", architecture, f"{plane.name} is kept per request, which the KV pool does not serve"
            )


def _num_host_blocks(cache: CacheConfig, block_bytes: int) -> int:
    """block_bytes: of all ranks together.

    Raises ConfigError if the host has not so much, if that holds no block, or if no prefix cache is on."""
    asked = cache.host_memory_bytes
    if not asked:
        return 0
    most = host_memory().available_bytes
    if not block_bytes <= asked <= most:
        accepted = f"0 (off), or from one block ({block_bytes}) to what this host has free ({most})"
        raise ConfigError("kv_cache_host_memory_bytes", asked, f"accepted: {accepted}")
    if not cache.enable_prefix_caching:
        raise ConfigError("kv_cache_host_memory_bytes", asked, "accepted: 0, because enable_prefix_caching is off")
    return asked // block_bytes


def _check_memory_bytes(plan: MemoryPlan, cache: CacheConfig) -> None:
    most = plan.free_bytes - plan.weight_bytes - plan.workspace_bytes
    if cache.memory_bytes > max(0, most):
        accepted = f"at most {most}" if most > 0 else "a smaller model, or more free memory"
        raise ConfigError(
            "memory_bytes",
            cache.memory_bytes,
            f"a KV pool of {size_text(cache.memory_bytes)} does not fit ({_bytes_sum(plan)}); accepted: {accepted}",
        )


def _check(plan: MemoryPlan, cache: CacheConfig, budget: int, blocks_per_sequence: int, most_tokens: int) -> None:
    if plan.num_blocks < blocks_per_sequence:
        field, value = ("num_blocks", cache.num_blocks) if cache.num_blocks else _memory_field(cache, plan)
        is_large = most_tokens > SchedulerConfig.max_num_batched_tokens and plan.workspace_bytes > plan.free_bytes
        if is_large and field == "max_model_len" and plan.weight_bytes < plan.free_bytes:
            reason = "a step of so many tokens, and of max_num_seqs requests, has no room"
            raise ConfigError("max_num_batched_tokens", most_tokens, f"{reason} ({_bytes_sum(plan)}); accepted: fewer")
        arithmetic = (
            f"a KV pool of {plan.num_blocks} blocks x {plan.block_size} tokens cannot hold one sequence of "
            f"max_model_len={plan.max_model_len} tokens, which needs {blocks_per_sequence} blocks"
        )
        advice = _advice(plan, cache, blocks_per_sequence)
        raise ConfigError(field, value, f"{arithmetic} ({_bytes_sum(plan)}); {advice}")
    if cache.num_blocks and plan.pool_bytes > max(0, plan.free_bytes - plan.weight_bytes - plan.workspace_bytes):
        raise ConfigError(
            "num_blocks",
            cache.num_blocks,
            f"a KV pool of {size_text(plan.pool_bytes)} does not fit ({_bytes_sum(plan)}); "
            f"accepted: at most {max(0, budget) // plan.bytes_per_block}",
        )


def _memory_field(cache: CacheConfig, plan: MemoryPlan) -> tuple[str, object]:
    if cache.memory_bytes:
        return "memory_bytes", cache.memory_bytes
    return "max_model_len", plan.max_model_len


def _advice(plan: MemoryPlan, cache: CacheConfig, blocks_per_sequence: int) -> str:
    fits = plan.groups.max_tokens(plan.num_blocks, plan.block_size)
    shorter = f"max_model_len at most {fits}" if fits else "a smaller model"
    if cache.num_blocks:
        return f"accepted: num_blocks at least {blocks_per_sequence}, or {shorter}"
    if cache.memory_bytes:
        return f"accepted: memory_bytes at least {blocks_per_sequence * plan.bytes_per_block}, or {shorter}"
    return f"accepted: {shorter}, or more free memory"


def _bytes_sum(plan: MemoryPlan) -> str:
    free, weights, workspace = size_text(plan.free_bytes), size_text(plan.weight_bytes), size_text(plan.workspace_bytes)
    block, drafter = size_text(plan.bytes_per_block), f", {size_text(plan.draft_block_bytes)} of it the drafter's"
    per_block = f"{block} per block{drafter if plan.draft_block_bytes else ''}"
    return f"{free} free - {weights} weights - {workspace} workspace, {per_block}"


def _pool_budget(cache: CacheConfig, remaining_bytes: int, device: torch.device) -> int:
    if cache.memory_bytes:
        return cache.memory_bytes
    if device.type == "cuda":
        return int(remaining_bytes * cache.memory_fraction)
    return min(DEFAULT_CPU_POOL_BYTES, int(remaining_bytes * CPU_SHARE_OF_FREE))
