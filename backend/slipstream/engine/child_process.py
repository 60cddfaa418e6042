"""Ties a child process to its parent. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if threads are stuck. The kernel does so when the
    thread that started it ends, so that must be one that lives as long as its process."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
