"""Which engine of a model a process is, and where it computes: the rules of `instance_group`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from slipstream.core.config_parse import with_replica
from slipstream.core.errors import ConfigError
from slipstream.core.replicas import MAX_REPLICAS, Replica, read_replica
from slipstream.engine.placement import placed

Groups = list[dict[str, Any]]


@pytest.mark.parametrize(
    ("groups", "index", "num_devices", "replica"),
    [
        ([], 0, 1, Replica()),
        ([{"kind": "KIND_CPU", "count": 1, "gpus": []}], 0, 2, Replica()),
        ([{"count": 3}], 2, 1, Replica(2, 3)),
        ([{"count": 4, "gpus": [0, 1, 2, 3]}], 2, 1, Replica(2, 4, (2,))),
        ([{"count": 2, "gpus": [4, 5, 2, 3]}], 1, 2, Replica(1, 2, (2, 3))),
        ([{"count": 1, "gpus": [0, 1]}, {"count": 2, "gpus": [4, 5, 6, 7]}], 2, 2, Replica(2, 3, (6, 7))),
        ([{"count": 1, "gpus": [3]}], 0, 1, Replica(0, 1, (3,))),
    ],
)
def test_a_group_names_engines_and_their_gpus(groups: Groups, index: int, num_devices: int, replica: Replica) -> None:
    assert read_replica(groups, index, num_devices) == replica


@pytest.mark.parametrize(
    ("groups", "num_devices", "message"),
    [
        ([{"count": 2, "gpus": [0, 1, 2]}], 1, r"gpus \[0, 1, 2\].*accepted: 2 engines x 1 ranks = 2 GPUs"),
        ([{"count": 1, "gpus": [0]}], 2, "accepted: 1 engines x 2 ranks = 2 GPUs"),
        ([{"count": 1, "gpus": [0, 2]}], 2, "numbers that follow each other"),
        ([{"count": 60}, {"count": 5}], 1, "instance_group=65: accepted: at most 64"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(groups: Groups, num_devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_replica(groups, 0, num_devices)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(parallel=ParallelConfig(2, num_nodes=2)), "num_nodes=2: accepted with several engines.*: 1"),
        (
            EngineConfig(model=ModelConfig(enable_lora=True, lora_cache_bytes=1 << 20)),
            "lora_cache_host_memory_bytes=1048576: accepted with several engines.*: 0",
        ),
    ],
)
def test_what_one_engine_alone_can_have(config: EngineConfig, message: str) -> None:
    """Requests go to either engine, and an adapter that a client sends is only where it was sent."""
    with pytest.raises(ConfigError, match=message):
        with_replica(config, [{"count": 2}], 0)
    assert with_replica(config, [{"count": 1}], 0) == config


@pytest.mark.parametrize(
    ("events", "replay", "count", "refused"),
    [
        ("tcp://h:5557", "tcp://h:5558", 2, r"kv_events_replay_endpoint='tcp://h:5558': .* 2 engines: a port at least"),
        ("tcp://h:5560", "tcp://h:5558", 3, r"kv_events_replay_endpoint='tcp://h:5558': .* 3 engines: a port at least"),
        ("tcp://h:65535", "", 2, "kv_events_endpoint=65535: accepted with 2 engines: ports up to 65534"),
        ("tcp://h:5557", "tcp://h:65534", 3, "kv_events_replay_endpoint=65534: accepted with 3 engines"),
        ("tcp://h:5557", "tcp://h:5558", 1, ""),
        ("tcp://h:5557", "tcp://h:5559", 2, ""),
        ("tcp://h:5557", "tcp://other:5558", 2, ""),
        ("ipc:///run/kv", "tcp://h:65534", 2, ""),
    ],
)
def test_engines_have_ports_of_their_own_for_kv_events(events: str, replay: str, count: int, refused: str) -> None:
    config = EngineConfig(cache=CacheConfig(events_endpoint=events, events_replay_endpoint=replay))
    if not refused:
        with_replica(config, [{"count": count}], 0)
        return
    with pytest.raises(ConfigError, match=refused):
        with_replica(config, [{"count": count}], 0)


def config_of(
    replica: Replica, device: str = "auto", size: int = 1, num_threads: int = 0, stages: int = 1
) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=size, pipeline_parallel_size=stages, replica=replica)
    return EngineConfig(model=ModelConfig(device=device, num_threads=num_threads), parallel=parallel)


def test_replicas_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert placed(config_of(Replica(1, 4), "cpu")).model.num_threads == 2
    assert placed(config_of(Replica(1, 40), "cpu")).model.num_threads == 1
    assert placed(config_of(Replica(1, 4), "cpu", num_threads=3)).model.num_threads == 3
    alone = config_of(Replica())
    assert placed(alone) is alone


def test_replicas_on_gpus_follow_each_other_or_are_where_the_group_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))  # GPUs of others may be old
    for config, device in (
        (config_of(Replica(1, 2), size=2), "cuda:2"),
        (config_of(Replica(1, 2), stages=2), "cuda:2"),
        (config_of(Replica(2, 3), "cuda:1"), "cuda:3"),
        (config_of(Replica(0, 2, (3,)), "cuda"), "cuda:3"),
        (config_of(Replica(0, 1, (2,))), "cuda:2"),
        (config_of(Replica(0, 1, (2,)), "cuda:1"), "cuda:1"),  # `device` was enough before, and still is
    ):
        assert placed(config).model.device == device
    for config, message in (
        (config_of(Replica(2, 3), size=2), "replica 2 needs GPUs 4 to 5 of 4"),
        (config_of(Replica(1, 2), size=2, stages=2), "replica 1 needs GPUs 4 to 7 of 4"),
        (config_of(Replica(1, 2, (9,))), "replica 1 needs GPUs 9 to 9 of 4"),
        (config_of(Replica(1, 2, (1,)), "cuda:0"), "device='cuda:0': accepted where instance_group names GPUs"),
        (config_of(Replica(1, 2, (1,)), "cpu"), "device=cpu is the CPU here"),
    ):
        with pytest.raises(ConfigError, match=message):
            placed(config)


def test_both_ends_have_the_same_bounds(root: Path) -> None:
    source = "".join((root / "backend" / "triton" / name).read_text() for name in ("model.h", "model.cc"))
    scheduler = SchedulerConfig()
    values = {"kMostReplicas": MAX_REPLICAS, "kDefaultSlack": scheduler.replica_load_slack}
    values |= {"kDefaultRunning": scheduler.max_num_seqs, "kDefaultWaiting": scheduler.max_waiting_requests}
    for name, value in values.items():
        found = re.search(rf"{name} = (\d+)", source)
        assert found and int(found[1]) == value
