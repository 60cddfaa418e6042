"""Processes that live: one that psutil lists may end before it is looked at, and a zombie has ended already.

Every look at another process goes through here: psutil raises for one that has ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
from patience import PATIENCE_S, wait_until

T = TypeVar("T")


def asked(figure: Callable[[], T], ended: T) -> T:
    """What psutil says of a process; `ended` of one that has ended."""
    try:
        return figure()
    except psutil.Error:
        return ended


def is_alive(process: psutil.Process) -> bool:
    return asked(process.is_running, False) and asked(process.status, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE


def command_of(process: psutil.Process) -> str:
    """Its command line; "" of one that has ended."""
    return " ".join(asked(process.cmdline, []))


def children_of(pid: int, command: str = "", *, recursive: bool = False) -> list[psutil.Process]:
    """Those that live and whose command line holds `command`, oldest first; none of a parent that has ended.

    A process that was just forked has its parent's command line.
    """
    listed = asked(lambda: psutil.Process(pid).children(recursive=recursive), [])
    found = [child for child in listed if is_alive(child) and command in command_of(child)]
    return sorted(found, key=lambda child: asked(child.create_time, float("inf")))


def zombies_of(pid: int) -> list[int]:
    """Process ids of those below that have ended and that nobody has waited for."""
    below = asked(lambda: psutil.Process(pid).children(recursive=True), [])
    return [child.pid for child in below if asked(child.status, "") == psutil.STATUS_ZOMBIE]


def thread_names(pid: int) -> list[str]:
    """Names of the live threads of a process."""
    names = []
    for comm in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append(comm.read_text().strip())
    return names


def pids_of(pid: int) -> set[int]:
    """The process ids of the children that live."""
    return {child.pid for child in children_of(pid)}


def only_child(pid: int, command: str = "") -> psutil.Process:
    """Waits until exactly one child lives: others may be ending, or it may be starting."""
    found: list[psutil.Process] = []

    def is_one() -> bool:
        found[:] = children_of(pid, command)
        return len(found) == 1

    wait_until(is_one, f"process {pid} to have one child {command}")
    return found[0]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all below it that live."""
    below = asked(lambda: [psutil.Process(pid)], []) + children_of(pid, recursive=True)
    return sum(sum(asked(one.cpu_times, (0.0, 0.0))[:2]) for one in below)


def is_gone(pid: int) -> bool:
    return not asked(lambda: is_alive(psutil.Process(pid)), False)


def wait_gone(*pids: int, timeout_s: float = PATIENCE_S) -> None:
    wait_until(lambda: all(map(is_gone, pids)), f"processes {pids} to end", timeout_s)
