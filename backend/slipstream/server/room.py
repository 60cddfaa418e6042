"""Selects the connection to close when a worker reaches its limit of connections or header bytes.

Slow clients cost an attacker nothing: a few hundred unfinished requests could occupy all connections for good. So a
connection that waits for its client is closed in favour of a new one. Event loop thread.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Protocol


class Guest(Protocol):
    """A connection. num_kept_bytes: headers of its requests. may_give_way: none of its answers is being sent."""

    @property
    def address(self) -> str: ...

    @property
    def num_kept_bytes(self) -> int: ...

    def may_give_way(self) -> bool: ...

    def give_way(self, reason: str) -> None: ...


class Room:
    """All connections of a worker. num_bytes: their header bytes, counted by the connections."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_of: Counter[str] = Counter()  # by address
        self._idle: dict[Guest, None] = {}  # between two requests, the longest first
        self._reading: dict[Guest, None] = {}  # in the middle of a request, likewise

    def enter(self, guest: Guest) -> None:
        self._num_of[guest.address] += 1

    def leave(self, guest: Guest) -> None:
        self.is_busy(guest)
        self._num_of[guest.address] -= 1
        if not self._num_of[guest.address]:
            del self._num_of[guest.address]

    def is_idle(self, guest: Guest) -> None:
        self.is_busy(guest)
        self._idle[guest] = None

    def is_reading(self, guest: Guest) -> None:
        self.is_busy(guest)
        self._reading[guest] = None

    def is_busy(self, guest: Guest) -> None:
        self._idle.pop(guest, None)
        self._reading.pop(guest, None)

    def longest_waiting(self, newcomer: Guest) -> Guest | None:
        """The connection that has waited longest: an idle one, else one with an incomplete request.

        Only from addresses with at least the average number of connections, so that a flood displaces itself.
        """
        average = self._num_of.total() / max(1, len(self._num_of))
        for guest in chain(self._idle, self._reading):
            if guest is not newcomer and self._num_of[guest.address] >= average and guest.may_give_way():
                return guest
        return None

    def largest_head(self, newcomer: Guest) -> Guest | None:
        """The connection with an incomplete request that keeps the most bytes; of equal ones the first."""
        others = [guest for guest in self._reading if guest is not newcomer and guest.may_give_way()]
        largest = max(others, key=lambda guest: guest.num_kept_bytes, default=None)
        return largest if largest is not None and largest.num_kept_bytes else None
