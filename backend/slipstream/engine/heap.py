"""Keeps the process from growing with the number of requests it has served.

On a CPU every step allocates tensors of 0.1 to 32 MiB, logits above all. glibc takes them from its heap, where small
blocks that live longer keep the freed ones from being given back: 10,000 small requests left 1 GiB of holes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slipstream.worker.residency import trim_heap

MAX_GROWTH_BYTES = 128 << 20  # a trim takes some 10 ms, during which threads that allocate wait


def resident_bytes() -> int:
    """Memory that this process has now, without what is swapped out."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class HeapTrimmer:
    """Gives free blocks of the heap back whenever the process has grown by max_growth_bytes. One thread."""

    def __init__(
        self,
        max_growth_bytes: int = MAX_GROWTH_BYTES,
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._max_growth_bytes = max_growth_bytes
        self._resident = resident
        self._trim = trim
        self._least_bytes = resident()  # since the last trim

    def check(self) -> None:
        """Takes some 10 us while nothing is to be done."""
        now = self._resident()
        if now - self._least_bytes > self._max_growth_bytes:
            self._trim()
            self._least_bytes = self._resident()
        self._least_bytes = min(self._least_bytes, now)
