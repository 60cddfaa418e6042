"""Starts child processes, and ties them to their parent. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def start_process(
    command: list[str], fds: tuple[int, ...], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process that has these of our file descriptors, under their numbers. environment: ours by default."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if threads are stuck. The kernel does so when the
    thread that started it ends, so that must be one that lives as long as its process."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
