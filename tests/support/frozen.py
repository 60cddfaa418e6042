"""Objects that are frozen for the garbage collector, as an engine's server does when it has loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.worker import residency


@contextmanager
def frozen() -> Iterator[None]:
    """All that there is. Afterwards the session's imports are again (conftest.py), and nothing of the test."""
    residency.freeze()
    try:
        yield
    finally:
        residency._collect()
        gc.freeze()
