"""Selects the connections to close when a worker reaches its limit of connections, or of bytes that it keeps for them.

Slow clients cost an attacker nothing: a few hundred unfinished requests could occupy all connections for good. So a
connection that waits for its client is closed in favour of a new one. Event loop thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from slipstream.server.options import GatewayOptions

_LEFT_UNREAD = 0.875  # of the limit of answers, once they had more: they are counted anew when the rest is used up
LEAST_READ_BYTES = 64 << 10  # less is nothing: the pace of an answer that has just begun is not known


class PooledConnection(Protocol):
    """A connection. num_kept_bytes: headers of its requests. num_body_bytes: of a body that is not complete.
    num_unread_bytes: of an answer; num_read_bytes: of all answers, by its client. may_give_way: none of its answers is
    being sent."""

    @property
    def address(self) -> str: ...

    @property
    def num_kept_bytes(self) -> int: ...

    @property
    def num_body_bytes(self) -> int: ...

    @property
    def num_unread_bytes(self) -> int: ...

    @property
    def num_read_bytes(self) -> int: ...

    def may_give_way(self) -> bool: ...

    def give_way(self, reason: str) -> None: ...

    def stop_sending(self, reason: str) -> None: ...


@dataclass
class _Unread:
    """An answer that waits for its client. num_bytes: when last counted; num_read: by its client before."""

    since: float
    num_read: int
    num_bytes: int = 0


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
        """The answer of a connection waits for its client, or has grown. Returns the connections whose answers give way
        to it, if all have more than so many bytes: those that would take the longest to be read. One that waits only
        now is none of them."""
        unread, is_new = self._unread.get(connection), False
        if unread is None:
            unread = self._unread[connection] = _Unread(time.monotonic(), connection.num_read_bytes)
            is_new = True
        self._num_unread_bytes += connection.num_unread_bytes - unread.num_bytes
        unread.num_bytes = connection.num_unread_bytes
        if self._num_unread_bytes <= most_bytes:
            return ()
        return self._slowest([one for one in self._unread if one is not connection or not is_new], most_bytes)

    def mark_read(self, connection: PooledConnection) -> None:
        if (unread := self._unread.pop(connection, None)) is not None:
            self._num_unread_bytes -= unread.num_bytes

    def _slowest(self, candidates: Sequence[PooledConnection], most_bytes: int) -> list[PooledConnection]:
        """Counts anew: clients have read since the last time."""
        for connection, unread in self._unread.items():
            unread.num_bytes = connection.num_unread_bytes
        total = self._num_unread_bytes = sum(unread.num_bytes for unread in self._unread.values())
        found = list[PooledConnection]()
        for connection in sorted(candidates, key=self._seconds_left, reverse=True):
            if total > _LEFT_UNREAD * most_bytes:
                total -= self._unread[connection].num_bytes
                found.append(connection)
        return found

    def _seconds_left(self, connection: PooledConnection) -> float:
        """Until its answer is read, at its client's pace."""
        unread = self._unread[connection]
        num_read = max(LEAST_READ_BYTES, connection.num_read_bytes - unread.num_read)
        return (time.monotonic() - unread.since) * unread.num_bytes / num_read


def turned_away(limits: GatewayOptions, reason: str) -> tuple[int, str, str, str]:
    """Arguments of _refuse for one of the limits of a worker."""
    if reason == "max_connections":
        message = f"{limits.max_connections} connections are open, as many as are accepted"
    elif reason == "max_total_body_bytes":
        limit = f"{limits.max_total_body_bytes} bytes of all requests together (--max-total-body-bytes)"
        message = f"Too many request bodies are being kept, accepted: {limit}"
    else:
        limit = f"{limits.max_total_header_bytes} bytes of all requests together (--max-total-header-bytes)"
        message = f"Too many headers are being kept, accepted: {limit}"
    return 503, f"{message}; try again later", reason, "unavailable"
