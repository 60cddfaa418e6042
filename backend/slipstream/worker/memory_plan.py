"""The memory plan: what weights, workspace and KV pool take, worked out before any weight is read. Pure arithmetic.

Runs once at load on the engine thread. `free_device_memory` is the only function here that looks at hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.core.config import CacheConfig, EngineConfig
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.errors import ConfigError
from slipstream.core.host_memory import host_memory
from slipstream.core.kv_groups import ONE_GROUP, KVGroups
from slipstream.nn.attention.latent import PREFIX_TOKENS
from slipstream.nn.kv_layout import KVLayout
from slipstream.nn.kv_types import gpu_geometry_refusal, resolve_kv_dtype
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec
from slipstream.nn.load import resolve_device, resolve_dtype, weight_bytes
from slipstream.nn.parallel import SINGLE, Parallel
from slipstream.nn.quant import choose_methods
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.draft_memory import draft_memory
from slipstream.worker.graph_shapes import MAX_DECODE_ROWS, MAX_TOKENS
from slipstream.worker.kv_groups import plan_groups
from slipstream.worker.sample.logprobs import MAX_PROMPT_ROWS

MIB = 1 << 20
DEFAULT_CPU_POOL_BYTES = 1 << 30
CPU_SHARE_OF_FREE = 0.5  # a development machine has other things to do with its memory
# fp32 copies of the logits that sampling holds at once (logits, probabilities, sorted values and indices, mask)
LOGITS_COPIES = 6
# activations of one token that live at once: residual, normed, qkv, attention output; gate, up and their product
HIDDEN_COPIES = 8
INTERMEDIATE_COPIES = 3


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
    hardware = Hardware(device, dtype, kv_dtype, _first_rank(config, device))
    if config.model.deterministic:
        _check_deterministic(config, spec, hardware)
    return hardware


def _first_rank(config: EngineConfig, device: torch.device) -> Parallel:
    """Raises ConfigError if there are not so many devices from this one on."""
    size = config.parallel.tensor_parallel_size
    if size == 1:
        if config.parallel.expert_parallel:
            raise ConfigError("expert_parallel", True, "accepted with tensor_parallel_size above 1")
        return SINGLE
    if config.model.load_format == "null":
        raise ConfigError("tensor_parallel_size", size, "load_format=null computes nothing; accepted: 1")
    parallel = Parallel(0, size, splits_experts=config.parallel.expert_parallel, num_nodes=config.parallel.num_nodes)
    if device.type == "cuda" and (device.index or 0) + parallel.num_local > torch.cuda.device_count():
        found = torch.cuda.device_count() - (device.index or 0)
        raise ConfigError("tensor_parallel_size", size, f"there are {found} usable GPUs from {device} on")
    return parallel


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
class MemoryPlan:
    """Bytes by use, and what they allow. num_blocks: of the KV pool; num_host_blocks: of what lies behind it."""

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
            ("weights", self.weight_bytes, ""),
            ("workspace (activations, logits)", self.workspace_bytes, ""),
            ("KV pool", self.pool_bytes, f"{self.num_blocks} blocks x {self.block_size} tokens"),
            ("  per token", self.pool_bytes // max(1, self.pool_tokens), self._windows_note),
        ]
        if self.draft_block_bytes:
            rows.append(("  of it the drafter's", self.num_blocks * self.draft_block_bytes, ""))
        if self.num_host_blocks:
            host_bytes = self.num_host_blocks * self.block_bytes
            rows.append(("host memory behind the KV pool", host_bytes, f"{self.num_host_blocks} blocks"))
        lines = [f"  {name:<32}{_size(num_bytes):>12}  {note}".rstrip() for name, num_bytes, note in rows]
        held = f"holds {self.num_full_sequences} sequences of max_model_len={self.max_model_len} tokens"
        return "\n".join(["memory plan", *lines, f"  {held}"])

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
    is_null = config.model.load_format == "null"
    max_model_len = resolve_max_model_len(config, spec)
    own = spec.of_rank(hardware.parallel)
    groups, full_hold_reason = plan_groups(own, config, hardware.device, hardware.kv_dtype, max_model_len)
    block_bytes = cache_bytes_per_token(own, hardware.kv_dtype, groups) * config.cache.block_size
    held_bytes = 0 if is_null else weight_bytes(config.model, spec, hardware.dtype, hardware.parallel)
    drafting = draft_memory(config, spec, hardware.device, hardware.dtype, hardware.kv_dtype, hardware.parallel)
    draft_block_bytes = drafting.kv_bytes_per_token * config.cache.block_size
    held_bytes += drafting.weight_bytes
    workspace_bytes = 0 if is_null else _workspace_bytes(spec, config, hardware)
    budget = _pool_budget(config.cache, free_bytes - held_bytes - workspace_bytes, hardware.device)
    blocks_per_sequence = groups.max_blocks(max_model_len, config.cache.block_size)
    num_blocks = config.cache.num_blocks
    if not num_blocks:
        enough = 2 * config.scheduler.max_num_seqs * blocks_per_sequence  # every sequence, and as much prefix cache
        num_blocks = enough if is_null else min(budget // (block_bytes + draft_block_bytes), enough)
    plan = MemoryPlan(
        free_bytes=free_bytes,
        weight_bytes=held_bytes,
        workspace_bytes=workspace_bytes,
        block_bytes=0 if is_null else block_bytes,
        block_size=config.cache.block_size,
        num_blocks=max(0, num_blocks),
        max_model_len=max_model_len,
        num_host_blocks=0 if is_null else _num_host_blocks(config.cache, block_bytes * hardware.parallel.size),
        draft_block_bytes=draft_block_bytes,
        groups=groups,
        full_hold_reason=full_hold_reason,
    )
    if not is_null:
        _check_memory_bytes(plan, config.cache)
    _check(plan, config.cache, budget, blocks_per_sequence)
    return plan


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


def _check(plan: MemoryPlan, cache: CacheConfig, budget: int, blocks_per_sequence: int) -> None:
    if plan.num_blocks < blocks_per_sequence:
        field, value = ("num_blocks", cache.num_blocks) if cache.num_blocks else _memory_field(cache, plan)
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


def _workspace_bytes(spec: DecoderSpec, config: EngineConfig, hardware: Hardware) -> int:
    """Logits, activations of the largest step and of the largest CUDA graph, which keeps them, weights written out."""
    num_tokens = config.scheduler.max_num_batched_tokens
    if hardware.device.type == "cuda" and config.model.cuda_graphs != "off":
        num_tokens += min(num_tokens, MAX_TOKENS)
    num_seqs = config.scheduler.max_num_seqs
    num_verified = min(MAX_DECODE_ROWS, num_seqs * (1 + MAX_DRAFT_TOKENS)) if config.speculation.loaded else 0
    logits = LOGITS_COPIES * max(num_seqs, num_verified, MAX_PROMPT_ROWS) * spec.vocab_size * 4
    width = max(_activation_width(layer.mlp, hardware.parallel) for layer in spec.layers)
    attentions = spec.of_rank(hardware.parallel).attentions
    features = num_tokens * width + max(_latent_features(attention, num_tokens) for attention in attentions)
    return logits + features * hardware.dtype.itemsize + _written_out_bytes(spec, config, hardware)


def _latent_features(attention: AttentionSpec, num_tokens: int) -> int:
    """Of latent attention: what lives at once of a step's tokens, absorbed or with keys and values of each head, and of
    a piece of the tokens before them."""
    latent = attention.latent
    if latent is None:
        return 0
    row, made = latent.rank + latent.rope_dim, latent.nope_dim + latent.value_dim
    absorbed = row + latent.rank
    unabsorbed = made + 2 * latent.value_dim
    of_heads = attention.num_q_heads * (attention.head_dim + max(absorbed, unabsorbed))
    return num_tokens * (of_heads + row) + PREFIX_TOKENS * (attention.num_q_heads * made + row)


def _activation_width(mlp: DenseSpec | ExpertsSpec, parallel: Parallel) -> int:
    """Features of one token that live at once in a layer of a rank."""
    rows = 1 if isinstance(mlp, DenseSpec) else mlp.routing.num_experts_per_token  # of a token in the MLP
    width = mlp.down.of_rank(parallel).in_features * rows  # whole where ranks split experts: all rows may be one rank's
    if isinstance(mlp, ExpertsSpec) and mlp.shared is not None:
        width += mlp.shared.down.of_rank(parallel).in_features
    return (HIDDEN_COPIES + rows - 1) * mlp.hidden_size + INTERMEDIATE_COPIES * width


def _written_out_bytes(spec: DecoderSpec, config: EngineConfig, hardware: Hardware) -> int:
    """The largest layer of those that products of many rows on a GPU write out first."""
    if hardware.device.type != "cuda":
        return 0
    methods = choose_methods(config.model, spec)
    held = [(linear, methods.experts if linear.num_experts else methods.linears) for linear in set(spec.layer_linears)]
    held.append((spec.lm_head, methods.head))
    own = [(linear.of_rank(hardware.parallel), method) for linear, method in held]
    return max(method.written_out_bytes(linear, hardware.dtype) for linear, method in own)


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes} B"
