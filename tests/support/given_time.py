"""A clock for bounds on waiting: it stands still while a thread could run and the machine gives its cores to others."""

from __future__ import annotations

import time
from pathlib import Path

_STATISTICS = Path("/proc/thread-self/schedstat")  # ns on a core, ns ready for one, slices


def given_seconds() -> float:
    """Seconds of this thread, from any start: on a core, or waiting for something else than a core."""
    return time.monotonic() - int(_STATISTICS.read_text().split()[1]) / 1e9
