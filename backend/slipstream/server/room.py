"""Which connection gives way when a worker has as many of them, or of the bytes of their headers, as it keeps.

A client that is slow on purpose pays nothing for it: some hundred heads that never end would shut everybody out, and be
sent anew when their time is over. So what waits for its client gives way to what comes. Event loop thread.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Protocol


class Guest(Protocol):
    """A connection. num_kept_bytes: of the headers of its requests. may_give_way: no answer of it is under way."""

    @property
    def address(self) -> str: ...

    @property
    def num_kept_bytes(self) -> int: ...

    def may_give_way(self) -> bool: ...

    def give_way(self, reason: str) -> None: ...


class Room:
    """Of all connections of a worker. num_bytes: what they keep of headers, counted by themselves."""

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
        """An idle connection, or else one whose request is not complete: that which has waited longest.

        Of an address that has at least the average number of connections: who floods the gateway makes room itself.
        """
        average = self._num_of.total() / max(1, len(self._num_of))
        for guest in chain(self._idle, self._reading):
            if guest is not newcomer and self._num_of[guest.address] >= average and guest.may_give_way():
                return guest
        return None

    def largest_head(self, newcomer: Guest) -> Guest | None:
        """Of those whose request is not complete, that which keeps most; of equal ones the first."""
        others = [guest for guest in self._reading if guest is not newcomer and guest.may_give_way()]
        largest = max(others, key=lambda guest: guest.num_kept_bytes, default=None)
        return largest if largest is not None and largest.num_kept_bytes else None
