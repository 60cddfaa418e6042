"""How much of the host's memory this process may use: the machine's, or less where a container (cgroup) limits it.

Read once at load, by whoever plans with it. Looks at files only: /proc, and /sys/fs/cgroup of version 1 or 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class HostMemory:
    """is_limited: by a cgroup below what the machine has. available_bytes: without swapping or running out."""

    total_bytes: int
    available_bytes: int
    is_limited: bool = False


@dataclass(frozen=True)
class _Files:
    """A version's files of one group, and the entry of memory.stat that is given back when memory is short."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The least of the machine and of every group around this process.  root: where /proc and /sys are."""
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
    """(limit, bytes in use that cannot be given back) of each limited group, from this process's own outwards."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _limits(mount / "memory", path, _V1)
        elif number == "0":
            yield from _limits(mount, path, _V2)


def _limits(mount: Path, path: str, files: _Files) -> Iterator[tuple[int, int]]:
    """In a container the path may be one of the host, which is not there: its own group is then the mount itself."""
    inner = PurePosixPath("/", *(part for part in PurePosixPath(path).parts if part != "..")).relative_to("/")
    for folder in (mount / inner, *(mount / parent for parent in inner.parents)):
        limit = _read(folder / files.limit).strip()
        if limit.isdigit():  # version 2 writes "max" for none, version 1 a number beyond every machine
            used = int(_read(folder / files.usage).strip() or 0)
            yield int(limit), used - _table(folder / "memory.stat").get(files.reclaimable, 0)


def _table(path: Path) -> dict[str, int]:
    """Lines `name number ...`."""
    words = (line.split() for line in _read(path).splitlines())
    return {entry[0]: int(entry[1]) for entry in words if len(entry) > 1 and entry[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):  # not Linux, not mounted, not allowed: then it limits nothing
        return ""
