"""Selects the connections to close when a worker reaches its limit of connections, or of bytes that it keeps for them.

Slow clients cost an attacker nothing: a few hundred unfinished requests could occupy all connections for good. So a
connection that waits for its client is closed in favour of a new one. Event loop thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

_LEFT_UNREAD = 0.875  # of the limit of answers, once they had more: they are counted anew when the rest is used up
_LEAST_READ_BYTES = 64 << 10  # counts as read of every answer, for one that has just begun


class PooledConnection(Protocol):
    """A connection. num_kept_bytes: headers of its requests. num_body_bytes: of a body that is not complete.
    num_unread_bytes: of an answer. may_give_way: none of its answers is being sent."""

    @property
    def address(self) -> str: ...

    @property
    def num_kept_bytes(self) -> int: ...

    @property
    def num_body_bytes(self) -> int: ...

    @property
    def num_unread_bytes(self) -> int: ...

    def may_give_way(self) -> bool: ...

    def give_way(self, reason: str) -> None: ...

    def stop_sending(self, reason: str) -> None: ...


@dataclass
class _Unread:
    """An answer that waits for its client. num_bytes: when they were last counted, of `most` in the beginning."""

    since: float
    most: int
    num_bytes: int

    def seconds_left(self, now: float) -> float:
        """Until it is read, at the client's pace."""
        return (now - self.since) * self.num_bytes / max(_LEAST_READ_BYTES, self.most - self.num_bytes)


class ConnectionPool:
    """All connections of a worker. num_bytes: their header bytes; num_body_bytes: of bodies that are not complete. Both
    are counted by the connections."""

    def __init__(self) -> None:
        self.num_bytes = self.num_body_bytes = 0
        self._num_of: Counter[str] = Counter()  # by address
        self._idle: dict[PooledConnection, None] = {}  # between two requests, the longest first
        self._reading: dict[PooledConnection, None] = {}  # in the middle of a request, likewise
        self._unread: dict[PooledConnection, _Unread] = {}
        self._num_unread_bytes = 0

    def enter(self, connection: PooledConnection) -> None:
        self._num_of[connection.address] += 1

    def leave(self, connection: PooledConnection) -> None:
        self.mark_busy(connection)
        self._num_of[connection.address] -= 1
        if not self._num_of[connection.address]:
            del self._num_of[connection.address]

    def mark_idle(self, connection: PooledConnection) -> None:
        self.mark_busy(connection)
        self._idle[connection] = None

    def mark_reading(self, connection: PooledConnection) -> None:
        self.mark_busy(connection)
        self._reading[connection] = None

    def mark_busy(self, connection: PooledConnection) -> None:
        self._idle.pop(connection, None)
        self._reading.pop(connection, None)

    def longest_waiting(self, newcomer: PooledConnection) -> PooledConnection | None:
        """The connection that has waited longest: an idle one, else one with an incomplete request.

        Only from addresses with at least the average number of connections, so that a flood displaces itself.
        """
        average = self._num_of.total() / max(1, len(self._num_of))
        for connection in chain(self._idle, self._reading):
            if connection is not newcomer and self._num_of[connection.address] >= average and connection.may_give_way():
                return connection
        return None

    def largest_head(self, newcomer: PooledConnection) -> PooledConnection | None:
        """The connection with an incomplete request that keeps the most bytes; of equal ones the first."""
        others = [
            connection for connection in self._reading if connection is not newcomer and connection.may_give_way()
        ]
        largest = max(others, key=lambda connection: connection.num_kept_bytes, default=None)
        return largest if largest is not None and largest.num_kept_bytes else None

    def by_body(self) -> list[PooledConnection]:
        """The connections with an incomplete body that may give way, the largest body first; of equal ones the one that
        has waited longest."""
        found = [connection for connection in self._reading if connection.num_body_bytes and connection.may_give_way()]
        return sorted(found, key=lambda connection: -connection.num_body_bytes)

    def mark_unread(self, connection: PooledConnection, most_bytes: int) -> Collection[PooledConnection]:
        """The answer of a connection waits for its client. Returns the connections whose answers give way to it, if all
        have more than so many bytes: those that would take the longest to be read."""
        self.mark_read(connection)
        num_bytes = connection.num_unread_bytes
        self._unread[connection] = _Unread(time.monotonic(), num_bytes, num_bytes)
        self._num_unread_bytes += num_bytes
        return self._slowest(connection, most_bytes) if self._num_unread_bytes > most_bytes else ()

    def mark_read(self, connection: PooledConnection) -> None:
        if (unread := self._unread.pop(connection, None)) is not None:
            self._num_unread_bytes -= unread.num_bytes

    def _slowest(self, newcomer: PooledConnection, most_bytes: int) -> list[PooledConnection]:
        """Counts anew: clients have read since the last time."""
        now, found = time.monotonic(), list[PooledConnection]()
        for connection, unread in self._unread.items():
            unread.num_bytes = connection.num_unread_bytes
        total = self._num_unread_bytes = sum(unread.num_bytes for unread in self._unread.values())
        for connection in sorted(self._unread, key=lambda one: -self._unread[one].seconds_left(now)):
            if total > _LEFT_UNREAD * most_bytes and connection is not newcomer:
                total -= self._unread[connection].num_bytes
                found.append(connection)
        return found
