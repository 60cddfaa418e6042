"""The memory that a process may use, from files like those of machines and containers."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.core.host_memory import HostMemory, host_memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {40 * GIB // 1024} kB\nHugePages_Total: 0\n"


def write_machine(root: Path, groups: str = "") -> Path:
    """groups: /proc/self/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    if groups:
        (root / "proc/self/cgroup").write_text(groups)
    return root


def write_group(folder: Path, limit: object, used: int, cache: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used)):
        (folder / name).write_text(f"{value}\n")
    # version 1 has the group's own beside the sum with those in it
    stat = f"inactive_file {cache}\n" if version == 2 else f"inactive_file 1\ntotal_inactive_file {cache}\n"
    (folder / "memory.stat").write_text(f"anon {used - cache}\n{stat}")


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert host_memory(write_machine(tmp_path)) == HostMemory(64 * GIB, 40 * GIB)


def test_version_2_inside_a_container(tmp_path: Path) -> None:
    """Its own group is the root of what it sees; its page cache can be given back."""
    root = write_machine(tmp_path, "0::/\n")
    write_group(root / "sys/fs/cgroup", 8 * GIB, used=5 * GIB, cache=2 * GIB)
    assert host_memory(root) == HostMemory(8 * GIB, 5 * GIB, is_limited=True)


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    root = write_machine(tmp_path, "0::/user.slice\n")
    write_group(root / "sys/fs/cgroup/user.slice", "max", used=5 * GIB)
    assert host_memory(root) == HostMemory(64 * GIB, 40 * GIB)


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    """For the limit and for what is left: an outer group is shared with others, and may be full."""
    root = write_machine(tmp_path, "0::/pod/engine\n")
    write_group(root / "sys/fs/cgroup/pod/engine", 16 * GIB, used=GIB)
    write_group(root / "sys/fs/cgroup/pod", 20 * GIB, used=18 * GIB)
    assert host_memory(root) == HostMemory(16 * GIB, 2 * GIB, is_limited=True)


def test_version_1_with_a_path_of_the_host(tmp_path: Path) -> None:
    """A container sees its group at the mount, whatever path /proc says."""
    root = write_machine(tmp_path, "5:cpuset:/docker/abc\n4:cpu,memory:/docker/abc\n0::/docker/abc\n")
    write_group(root / "sys/fs/cgroup/memory", 4 * GIB, used=GIB, cache=GIB // 2, version=1)
    assert host_memory(root) == HostMemory(4 * GIB, 4 * GIB - GIB // 2, is_limited=True)


def test_version_1_without_a_limit_has_a_number_beyond_every_machine(tmp_path: Path) -> None:
    root = write_machine(tmp_path, "4:memory:/\n")
    write_group(root / "sys/fs/cgroup/memory", "9223372036854771712", used=GIB, version=1)
    assert host_memory(root) == HostMemory(64 * GIB, 40 * GIB)


def test_a_full_group_has_nothing_left(tmp_path: Path) -> None:
    root = write_machine(tmp_path, "0::/../../else\n")
    write_group(root / "sys/fs/cgroup", GIB, used=2 * GIB)
    assert host_memory(root) == HostMemory(GIB, 0, is_limited=True)


def test_elsewhere_than_on_linux_the_total_is_what_is_known(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found == HostMemory(total, total)


def test_this_machine() -> None:
    found = host_memory()
    assert 0 < found.available_bytes <= found.total_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
