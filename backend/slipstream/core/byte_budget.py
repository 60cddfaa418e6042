"""Bytes that requests hold together until they are answered, and their bound. Any thread."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Taken(NamedTuple):
    """What other requests hold."""

    num_bytes: int
    num_requests: int


class ByteBudget:
    """The bytes of each request, by handle. The total is their sum, which cannot drift: there are at most max_num_seqs
    and max_waiting_requests of them. A subclass says what a request takes, and refuses it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(self._taken.values())

    def _hold(self, handle: int, num_bytes: int) -> Taken | None:
        """None if a request has them now; what the others hold if that leaves too few."""
        with self._lock:
            taken = sum(self._taken.values())
            if taken + num_bytes > self._limit:
                return Taken(taken, len(self._taken))
            self._taken[handle] = num_bytes
            return None

    def give(self, handle: int) -> None:
        """A handle that has taken nothing is ignored."""
        with self._lock:
            self._taken.pop(handle, None)
