"""The order of an encoder's requests: short ones do not wait for long ones, and long ones wait for a bounded time.

One thread of its own runs all of them; any thread hands them over. Knows no model and no server.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Row = TypeVar("Row")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_SIZE_PER_S = 3200  # a request of this size lets those pass that come up to a second later
MAX_WAITING = 1_000_000  # in all; `submit` waits beyond it, so that the caller's own queue bounds what waits
_MAX_DEPTH = 4  # requests that make way for each other
_END_S = 30.0


@dataclass(order=True)
class _Job(Generic[Row, Result]):
    """turn: those with the lowest go first."""

    turn: float
    number: int
    rows: Sequence[Row] = field(compare=False)
    size: int = field(compare=False)
    done: Callable[[Sequence[Result] | Exception], None] = field(compare=False)


class ShortFirst(Generic[Row, Result]):
    """compute: the results of rows, one each; it calls `give_way` between two steps. max_size: of the requests that are
    computed together, but for one that is larger by itself."""

    def __init__(self, compute: Callable[[list[Row]], Sequence[Result]], max_size: int) -> None:
        self._compute, self._max_size = compute, max_size
        self._changed = threading.Condition()
        self._waiting: list[_Job[Row, Result]] = []  # a heap
        self._num_taken = self._waiting_size = 0
        self._is_closed = False
        self._running: list[float] = []  # the turns of what runs: the last one has interrupted those before it
        self._thread = threading.Thread(target=self._run, daemon=True, name="encoder")
        self._thread.start()

    def submit(self, rows: Sequence[Row], size: int, done: Callable[[Sequence[Result] | Exception], None]) -> None:
        """done: called on the thread with the results, or with what computing them raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._waiting_size + size <= MAX_WAITING)
            self._num_taken += 1
            turn = time.monotonic() + size / _SIZE_PER_S
            heapq.heappush(self._waiting, _Job(turn, self._num_taken, rows, size, done))
            self._waiting_size += size
            self._changed.notify_all()

    def give_way(self) -> None:
        """Serve the requests that come before the running one, which has begun before they came."""
        while self._running and len(self._running) < _MAX_DEPTH:
            with self._changed:
                batch = self._next_batch(self._running[-1])
            if not batch:
                return
            self._serve(batch)

    def close(self) -> None:
        """End the thread once everything is answered."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_END_S)

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                batch = self._next_batch(math.inf)
            if not batch:
                return
            self._serve(batch)

    def _next_batch(self, end: float) -> list[_Job[Row, Result]]:
        """Those whose turn is next, and before `end`. With the lock."""
        batch: list[_Job[Row, Result]] = []
        room = self._max_size
        while self._waiting and self._waiting[0].turn < end and (not batch or self._waiting[0].size <= room):
            batch.append(heapq.heappop(self._waiting))
            room -= batch[-1].size
        self._waiting_size -= sum(job.size for job in batch)
        self._changed.notify_all()
        return batch

    def _serve(self, batch: list[_Job[Row, Result]]) -> None:
        """What computing them raises is told to the one that it is of."""
        self._running.append(batch[-1].turn)
        try:
            found = self._compute([row for job in batch for row in job.rows])
        except Exception as error:  # of a library: it may raise anything
            if len(batch) == 1:
                _tell(batch[0], error)
            else:
                for job in batch:
                    self._serve([job])
        else:
            first = 0
            for job in batch:
                first, start = first + len(job.rows), first
                _tell(job, found[start:first])
        finally:
            self._running.pop()


def _tell(job: _Job[Row, Result], found: Sequence[Result] | Exception) -> None:
    try:
        job.done(found)
    except Exception:  # the others are to be told all the same
        _log.exception("a request of an encoder cannot be answered")
