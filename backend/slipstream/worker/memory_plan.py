"""The memory plan: what weights, workspace and KV pool take, worked out before any weight is read. Pure arithmetic.

Runs once at load on the engine thread. `free_device_memory` is the only function here that looks at hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from slipstream.core.config import CacheConfig, EngineConfig, SchedulerConfig
from slipstream.core.errors import ConfigError
from slipstream.core.host_memory import host_memory
from slipstream.core.kv_groups import ONE_GROUP, KVGroups
from slipstream.nn.kv_layout import KVLayout
from slipstream.nn.kv_types import gpu_geometry_refusal, resolve_kv_dtype
from slipstream.nn.load import require_capability, resolve_device, resolve_dtype, weight_bytes
from slipstream.nn.parallel import FIELD, SINGLE, Parallel
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.draft_memory import draft_memory
from slipstream.worker.kv_groups import plan_groups
from slipstream.worker.kv_offload import buffer_bytes
from slipstream.worker.stages import FIELD as STAGES_FIELD
from slipstream.worker.stages import stage_layers
from slipstream.worker.workspace import workspace_bytes

MIB = 1 << 20
DEFAULT_CPU_POOL_BYTES = 1 << 30
MAX_CPU_RANKS = 8  # processes of a machine, where no number of devices bounds them
CPU_SHARE_OF_FREE = 0.5  # a development machine has other things to do with its memory


@dataclass(frozen=True)
class Hardware:
    """Where to compute and in which types, with every "auto" resolved. kv_dtype: as ops.KvCache names types.

    parallel: of several processes that share the model, which one computes here."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    parallel: Parallel = SINGLE


def resolve_hardware(config: EngineConfig, spec: DecoderSpec) -> Hardware:
    """Raises ConfigError for a device that is not there, for a type of cache that cannot serve there, and for what
    deterministic mode cannot have."""
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, spec, device)
    kv_dtype = resolve_kv_dtype(config.cache.dtype, spec, device, dtype, config.cache.block_size)
    parallel = _first_rank(config, device)
    is_cut = config.parallel.pipeline_parallel_size > 1
    draft_bytes = draft_memory(config, spec, device, dtype, kv_dtype, parallel).weight_bytes if is_cut else 0
    parallel = replace(parallel, layers=stage_layers(config, spec, dtype, parallel, draft_bytes))
    hardware = Hardware(device, dtype, kv_dtype, parallel)
    if config.model.deterministic:
        _check_deterministic(config, spec, hardware)
    return hardware


def _first_rank(config: EngineConfig, device: torch.device) -> Parallel:
    """Without its stage's layers. Raises ConfigError if there are not so many devices from this one on."""
    settings = config.parallel
    size, num_ranks = settings.tensor_parallel_size, settings.num_ranks
    if size == 1 and settings.expert_parallel:
        raise ConfigError("expert_parallel", True, "accepted with tensor_parallel_size above 1")
    if num_ranks == 1:
        return SINGLE
    field, value = FIELD, size
    if size == 1:
        field, value = STAGES_FIELD, settings.pipeline_parallel_size
    if config.model.load_format == "null":
        raise ConfigError(field, value, "load_format=null computes nothing; accepted: 1")
    first, num_local = device.index or 0, num_ranks // settings.num_nodes
    found = torch.cuda.device_count() - first
    if device.type == "cpu" and num_local > MAX_CPU_RANKS:
        accepted = f"tensor_parallel_size x pipeline_parallel_size / num_nodes up to {MAX_CPU_RANKS}"
        raise ConfigError(field, value, f"{num_local} processes of a machine; accepted on a CPU: {accepted}")
    if device.type == "cuda" and num_local > found:
        raise ConfigError(field, value, f"needs {num_local} GPUs; there are {found} usable ones from {device} on")
    for index in range(first, first + num_local) if device.type == "cuda" else ():
        require_capability(config.model.device, index)
    return Parallel(0, size, splits_experts=settings.expert_parallel, num_nodes=settings.num_nodes)


def _check_deterministic(config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> None:
    acceptance = config.speculation.acceptance
    if acceptance != "exact":
        raise ConfigError("speculative_acceptance", acceptance, "deterministic: accepted: exact")
    if hardware.device.type == "cpu":
        if hardware.dtype != torch.float32:
            raise ConfigError("dtype", config.model.dtype, "deterministic: accepted on a CPU: float32")
        return
    refusal = gpu_geometry_refusal(spec, config.cache.block_size, hardware.kv_dtype)
    if refusal is not None:
        raise ConfigError("deterministic", True, refusal)


@dataclass(frozen=True)
class StageMemory:
    """Of a rank of one stage. layers: their numbers in the model. draft_block_bytes: of bytes_per_block."""

    layers: range
    weight_bytes: int
    workspace_bytes: int
    bytes_per_block: int
    draft_block_bytes: int = 0

    def pool_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.bytes_per_block

    def total_bytes(self, num_blocks: int) -> int:
        """Of all that a rank allocates. num_blocks: of the KV pool."""
        return self.weight_bytes + self.workspace_bytes + self.pool_bytes(num_blocks)

    def row(self, index: int, num_blocks: int) -> tuple[str, int, str]:
        """Of the plan's table."""
        pool = _size(self.pool_bytes(num_blocks))
        note = f"{_size(self.weight_bytes)} weights, {_size(self.workspace_bytes)} workspace, {pool} KV pool"
        if self.draft_block_bytes:
            note += f", {_size(num_blocks * self.draft_block_bytes)} of it the drafter's"
        return (
            f"stage {index}: layers {self.layers.start} to {self.layers.stop - 1}",
            self.total_bytes(num_blocks),
            note,
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and what they allow. num_blocks: of the KV pool; num_host_blocks: of what lies behind it.

    stages: of a model in several; the plan is that of a rank of `stage`, where the fewest blocks fit. All have so many.
    """

    free_bytes: int
    weight_bytes: int
    workspace_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0
    draft_block_bytes: int = 0  # of the drafter's cache, per block of the pool
    groups: KVGroups = ONE_GROUP
    full_hold_reason: str = ""  # why windowed layers hold every token, if there are some that do
    stages: tuple[StageMemory, ...] = ()
    stage: int = 0

    @property
    def bytes_per_block(self) -> int:
        """A block of the model's cache and its twin in the drafter's."""
        return self.block_bytes + self.draft_block_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds, with several groups in sequences of max_model_len."""
        num_blocks = -(-self.max_model_len // self.block_size)
        return self.num_blocks * num_blocks // self._blocks_of_longest * self.block_size

    @property
    def num_full_sequences(self) -> int:
        """Sequences of max_model_len tokens that the pool holds at once."""
        return self.num_blocks // self._blocks_of_longest

    @property
    def _blocks_of_longest(self) -> int:
        return self.groups.decode_blocks(self.max_model_len, self.block_size)

    def __str__(self) -> str:
        rows = [
            ("free device memory", self.free_bytes, ""),
            ("weights", self.weight_bytes, self._stage_note),
            ("workspace (activations, logits)", self.workspace_bytes, ""),
            ("KV pool", self.pool_bytes, f"{self.num_blocks} blocks x {self.block_size} tokens"),
            ("  per token", self.pool_bytes // max(1, self.pool_tokens), self._windows_note),
        ]
        if self.draft_block_bytes:
            rows.append(("  of it the drafter's", self.num_blocks * self.draft_block_bytes, ""))
        if self.num_host_blocks:
            host_bytes = self.num_host_blocks * self.block_bytes
            rows.append(("host memory behind the KV pool", host_bytes, f"{self.num_host_blocks} blocks"))
        rows += [stage.row(index, self.num_blocks) for index, stage in enumerate(self.stages)]
        lines = [f"  {name:<32}{_size(num_bytes):>12}  {note}".rstrip() for name, num_bytes, note in rows]
        held = f"holds {self.num_full_sequences} sequences of max_model_len={self.max_model_len} tokens"
        return "\n".join(["memory plan", *lines, f"  {held}"])

    @property
    def _stage_note(self) -> str:
        if not self.stages:
            return ""
        return f"here and below those of stage {self.stage}, where the fewest blocks fit"

    @property
    def _windows_note(self) -> str:
        if self.full_hold_reason:
            return f"windowed layers hold every token: {self.full_hold_reason}"
        groups = self.groups
        if not groups.num_windowed:
            return ""
        kept = f"{groups.num_windowed} of {groups.num_groups} groups of layers hold {groups.num_kept_tokens} tokens"
        return f"at max_model_len: {kept} and a step"


def free_device_memory(hardware: Hardware) -> int:
    """Bytes that this process may still take on the device. Ranks on a CPU take from the same memory."""
    if hardware.device.type == "cuda":
        return torch.cuda.mem_get_info(hardware.device)[0]
    return host_memory().available_bytes // hardware.parallel.num_local


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
    drafting = draft_memory(config, spec, hardware.device, hardware.dtype, hardware.kv_dtype, hardware.parallel)
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
            f"a KV pool of {_size(cache.memory_bytes)} does not fit ({_bytes_sum(plan)}); accepted: {accepted}",
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
            f"a KV pool of {_size(plan.pool_bytes)} does not fit ({_bytes_sum(plan)}); "
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
    free, weights, workspace = _size(plan.free_bytes), _size(plan.weight_bytes), _size(plan.workspace_bytes)
    block, drafter = _size(plan.bytes_per_block), f", {_size(plan.draft_block_bytes)} of it the drafter's"
    per_block = f"{block} per block{drafter if plan.draft_block_bytes else ''}"
    return f"{free} free - {weights} weights - {workspace} workspace, {per_block}"


def _pool_budget(cache: CacheConfig, remaining_bytes: int, device: torch.device) -> int:
    if cache.memory_bytes:
        return cache.memory_bytes
    if device.type == "cuda":
        return int(remaining_bytes * cache.memory_fraction)
    return min(DEFAULT_CPU_POOL_BYTES, int(remaining_bytes * CPU_SHARE_OF_FREE))


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes} B"
