"""Waiting in tests, with time limits for slow machines.

A test checks what holds and in which order, never how soon: a machine that stalls for half a second is no defect.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll condition() until it is true.  Raises AssertionError when it does not become so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
