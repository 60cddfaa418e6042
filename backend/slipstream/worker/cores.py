"""The CPU cores of a process: how many threads compute on them and, of a rank, which are next to its GPU.

Bound to these, its memory comes from their NUMA node, and what it launches crosses no link between processors. Linux's
sysfs only.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class NearCores:
    """node: of NUMA; -1: the machine has no such thing, or does not tell."""

    node: int
    cores: frozenset[int]


def near_cores(pci_address: str, devices: Path = _PCI_DEVICES) -> NearCores | None:
    """Cores near a device, by an address like 0000:1b:00.0; None if sysfs does not have it, as in some containers."""
    folder = devices / pci_address.lower()
    try:
        node, listed = (folder / "numa_node").read_text(), (folder / "local_cpulist").read_text()
        return NearCores(int(node), _numbers(listed))
    except (OSError, ValueError):
        return None


def bind_near(device: torch.device, devices: Path = _PCI_DEVICES) -> None:
    """Let this thread, and those that it starts, run on the cores next to a GPU only, as far as it may use them. Does
    nothing for other devices, and where all cores are equally near."""
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
    found = None if min(domain, bus, number) < 0 else near_cores(f"{domain:04x}:{bus:02x}:{number:02x}.0", devices)
    if found is None:
        logger.info("%s: which cores are near is not known", device)
        return
    allowed = os.sched_getaffinity(0)
    cores = found.cores & allowed
    if cores and cores != allowed:
        os.sched_setaffinity(0, cores)
        logger.info("%s: bound to %d cores of NUMA node %d", device, len(cores), found.node)


def _numbers(listed: str) -> frozenset[int]:
    """The numbers in a list like 0-3,8,10-11. Raises ValueError."""
    found: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def set_threads(num_threads: int, num_ranks: int) -> None:
    """Compute with so many threads; 0: one fewer than cores: the last is for the server, the output thread and clients.
    Ranks share them.

    OpenMP's threads spin at their barriers: with a thread per core and other work running, a step of 64 decodes of a
    14 M model took 800 ms instead of 35 ms (two cores, load 5).
    """
    num_cores = len(os.sched_getaffinity(0))
    if num_ranks > 1:
        num_threads = max(1, (num_threads or num_cores - 1) // num_ranks)
    if num_threads:
        torch.set_num_threads(num_threads)
    elif torch.get_num_threads() >= num_cores > 1:
        torch.set_num_threads(num_cores - 1)
    logger.info("computing with %d threads on %d cores", torch.get_num_threads(), num_cores)
