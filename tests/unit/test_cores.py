"""Binding ranks to the cores next to their GPUs, by a tree of files like sysfs's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slipstream.worker.cores import NearCores, bind_near, near_cores

GPU = torch.device("cuda", 1)


def add_device(devices: Path, address: str, node: str, cores: str) -> None:
    (devices / address).mkdir()
    (devices / address / "numa_node").write_text(f"{node}\n")
    (devices / address / "local_cpulist").write_text(f"{cores}\n")


def test_what_sysfs_says(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:1b:00.0", "1", "16-18,40,42-43")
    add_device(tmp_path, "0001:9d:00.0", "-1", "")
    assert near_cores("0000:1B:00.0", tmp_path) == NearCores(1, frozenset({16, 17, 18, 40, 42, 43}))
    assert near_cores("0001:9d:00.0", tmp_path) is None and near_cores("0000:00:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("cores", "allowed", "expected"),
    [("4-7", range(8), {4, 5, 6, 7}), ("4-7", range(6), {4, 5}), ("4-7", range(4), None), ("0-7", range(8), None)],
)
def test_a_rank_is_bound(
    cores: str, allowed: range, expected: set[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To those of the near cores that it may use; not at all where there are none, or no others."""
    add_device(tmp_path, "0000:1b:00.0", "1", cores)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    bound: list[set[int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, found: bound.append(set(found)))
    bind_near(GPU, tmp_path)
    assert bound == ([] if expected is None else [expected])


def test_nothing_is_bound_without_a_gpu_or_what_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, found: pytest.fail("bound"))
    bind_near(torch.device("cpu"), tmp_path)
    for properties in (SimpleNamespace(), SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        bind_near(GPU, tmp_path)
