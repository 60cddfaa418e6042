"""Where a replica of a model computes: its GPUs, or its part of the cores. Runs once, before the model is loaded."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.load import find_device

logger = logging.getLogger(__name__)


def placed(config: EngineConfig) -> EngineConfig:
    """The configuration with this replica's device and threads; unchanged where instance_group asks for nothing.

    Raises ConfigError for GPUs that are not there, or that `device` contradicts.
    """
    replica, device_name = config.parallel.replica, config.model.device
    if replica.num_replicas == 1 and (not replica.gpus or ":" in device_name):
        return config
    device = find_device(device_name)
    if device.type == "cpu":
        if replica.gpus:
            raise ConfigError("instance_group", f"gpus {list(replica.gpus)}", f"device={device_name} is the CPU here")
        return replace(config, model=replace(config.model, num_threads=_threads(config)))
    num_devices = config.parallel.devices_per_node
    first = (device.index or 0) + replica.index * num_devices
    if replica.gpus:
        if ":" in device_name:
            accepted = "accepted where instance_group names GPUs: auto or cuda"
            raise ConfigError("device", device_name, accepted)
        first = replica.gpus[0]
    num_found = torch.cuda.device_count()
    if first + num_devices > num_found:
        refusal = f"replica {replica.index} needs GPUs {first} to {first + num_devices - 1} of {num_found}"
        raise ConfigError("instance_group", f"{replica.num_replicas} engines", refusal)
    logger.info("replica %d of %d is on cuda:%d", replica.index, replica.num_replicas, first)
    return replace(config, model=replace(config.model, device=f"cuda:{first}"))


def _threads(config: EngineConfig) -> int:
    """Replicas share the cores, of which one is left to the server and its clients."""
    num_cores = len(os.sched_getaffinity(0))
    return config.model.num_threads or max(1, (num_cores - 1) // config.parallel.replica.num_replicas)
