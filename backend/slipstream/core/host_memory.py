"""Memory available to this process: the machine's, or less where a container (cgroup v1 or v2) limits it.

Read once at load for memory plans, from /proc and /sys/fs/cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class HostMemory:
    """available_bytes: free or reclaimable without swapping. is_limited: a cgroup allows less than the machine has."""

    total_bytes: int
    available_bytes: int
    is_limited: bool = False


@dataclass(frozen=True)
class _Files:
    """File names of a cgroup version. reclaimable: the entry of memory.stat that the kernel can reclaim."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The minimum over the machine and every cgroup of this process.  root: the folder with /proc and /sys."""
    found = _machine(root)
    for limit, used in _groups(root):
        if limit < found.total_bytes:
            available = min(found.available_bytes, max(0, limit - used))
            found = HostMemory(limit, available, is_limited=True)
        elif limit - used < found.available_bytes:
            found = HostMemory(found.total_bytes, max(0, limit - used), found.is_limited)
    return found


def _machine(root: Path) -> HostMemory:
    values = _table(root / "proc/meminfo")
    total = values.get("MemTotal:", 0) * 1024 or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(total, values.get("MemAvailable:", 0) * 1024 or total)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used bytes that cannot be reclaimed) of each limited cgroup, innermost first."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _limits(mount / "memory", path, _V1)
        elif number == "0":
            yield from _limits(mount, path, _V2)


def _limits(mount: Path, path: str, files: _Files) -> Iterator[tuple[int, int]]:
    """The limits of a cgroup and its parents. In a container, a path that exists only on the host means the mount."""
    inner = PurePosixPath("/", *(part for part in PurePosixPath(path).parts if part != "..")).relative_to("/")
    for folder in (mount / inner, *(mount / parent for parent in inner.parents)):
        limit = _read(folder / files.limit).strip()
        if limit.isdigit():  # no limit: "max" in version 2, a huge number in version 1
            used = int(_read(folder / files.usage).strip() or 0)
            yield int(limit), used - _table(folder / "memory.stat").get(files.reclaimable, 0)


def _table(path: Path) -> dict[str, int]:
    """Parse lines `name number ...`."""
    words = (line.split() for line in _read(path).splitlines())
    return {entry[0]: int(entry[1]) for entry in words if len(entry) > 1 and entry[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):  # not Linux, not mounted or not readable: no limit
        return ""
