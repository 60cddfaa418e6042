"""resolve_hardware: which device, types and ranks a configuration means, before any weight is read.

Runs once at load on the engine thread. Refuses devices that are not there and types that cannot serve there.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.kv_types import gpu_geometry_refusal, resolve_kv_dtype
from slipstream.nn.load import require_capability, resolve_device, resolve_dtype
from slipstream.nn.parallel import FIELD, SINGLE, Parallel
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.draft_memory import draft_memory
from slipstream.worker.hardware import Hardware
from slipstream.worker.stages import FIELD as STAGES_FIELD
from slipstream.worker.stages import stage_layers

MAX_CPU_RANKS = 8  # processes of a machine, where no number of devices bounds them


def resolve_hardware(config: EngineConfig, spec: DecoderSpec) -> Hardware:
    """Raises ConfigError for a device that is not there, for a type of cache that cannot serve there, and for what
    deterministic mode cannot have."""
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, spec, device)
    kv_dtype = resolve_kv_dtype(config.cache.dtype, spec, device, dtype, config.cache.block_size)
    hardware = Hardware(device, dtype, kv_dtype, _first_rank(config, device))
    is_cut = config.parallel.pipeline_parallel_size > 1
    draft_bytes = draft_memory(config, spec, hardware).weight_bytes if is_cut else 0
    layers = stage_layers(config, spec, dtype, hardware.parallel, draft_bytes)
    hardware = replace(hardware, parallel=replace(hardware.parallel, layers=layers))
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
