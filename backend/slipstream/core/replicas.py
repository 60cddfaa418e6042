"""Which of a model's engines this one is: what `instance_group` of config.pbtxt says. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import ConfigError

MAX_REPLICAS = 64  # backend/triton/model.h


@dataclass(frozen=True)
class Replica:
    """index: from 0 to num_replicas - 1. gpus: those that instance_group names for this one, () for none."""

    index: int = 0
    num_replicas: int = 1
    gpus: tuple[int, ...] = ()


def read_replica(groups: Sequence[Mapping[str, Any]], index: int, num_devices: int) -> Replica:
    """The replica of that index. num_devices: what each one needs. A group of `count` engines that names GPUs names
    those of the first engine first. Raises ConfigError."""
    counts = [max(1, int(group.get("count", 1))) for group in groups] or [1]
    if sum(counts) > MAX_REPLICAS:
        raise ConfigError("instance_group", sum(counts), f"accepted: at most {MAX_REPLICAS} engines in all")
    num_before = 0
    for group, count in zip(groups, counts, strict=False):
        gpus = tuple(int(gpu) for gpu in group.get("gpus", ()))
        if gpus and len(gpus) != count * num_devices:
            needed = f"{count} engines x {num_devices} ranks = {count * num_devices} GPUs"
            raise ConfigError("instance_group", f"gpus {list(gpus)}", f"accepted: {needed}, engine by engine")
        if index < num_before + count:
            first = (index - num_before) * num_devices
            return Replica(index, sum(counts), _neighbours(gpus[first : first + num_devices]))
        num_before += count
    return Replica(index, sum(counts))


def _neighbours(gpus: tuple[int, ...]) -> tuple[int, ...]:
    if gpus and gpus != tuple(range(gpus[0], gpus[0] + len(gpus))):
        accepted = "accepted for the ranks of one engine: numbers that follow each other"
        raise ConfigError("instance_group", f"gpus {list(gpus)}", accepted)
    return gpus
