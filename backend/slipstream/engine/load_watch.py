"""How the engine finds a rank that lives and is stuck in a load or a wake: by what ranks report while they load.

A rank is stuck that has done nothing for rank_load_timeout_s, without waiting for another. A rank reports from a thread
of its own, as the one that loads may be stuck; so silence counts as nothing done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from slipstream.core.load_progress import LoadProgress

_PERIOD_S = 1.0  # of reports
_PERIODS_PER_LIMIT = 4
_MAX_CHARS = 200
# where a thread waits for other ranks, or for the engine
_WAITING = ("torch.distributed", "multiprocessing.connection", "slipstream.engine.rank_link")


@dataclass(frozen=True)
class Report:
    """mark: see LoadProgress. last: what the rank has done last. waits: for others, so that it can do nothing."""

    mark: str
    last: str
    waits: bool

    @classmethod
    def of(cls, progress: LoadProgress, thread_id: int) -> Report:
        """thread_id: of the thread that loads."""
        return cls(progress.mark, progress.last, _waits(thread_id))

    @classmethod
    def received(cls, mark: Any, last: Any, waits: Any) -> Report:
        """The report in what another process says."""
        return cls(str(mark)[:_MAX_CHARS], str(last)[:_MAX_CHARS], waits is True)

    @property
    def message(self) -> tuple[str, str, bool]:
        return self.mark, self.last, self.waits


class LoadReports(Protocol):
    """A rank's, which reports between `begin` and `end`, of the thread that calls `begin`."""

    def begin(self, progress: LoadProgress) -> None: ...

    def end(self) -> None: ...


class ConnectionReports:
    """See LoadReports: by a thread, to the engine of this machine."""

    def __init__(self, connection: Connection, limit_s: float) -> None:
        """limit_s: rank_load_timeout_s."""
        self._connection, self._period_s = connection, min(_PERIOD_S, limit_s / _PERIODS_PER_LIMIT)
        self._is_on = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, progress: LoadProgress) -> None:
        self._progress, self._thread_id = progress, threading.get_ident()
        self._is_on.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._is_on.clear()

    def _run(self) -> None:
        try:
            while self._is_on.wait():
                self._connection.send(Report.of(self._progress, self._thread_id).message)
                time.sleep(self._period_s)
        except OSError:
            pass  # the engine is gone, or has what it needs


class LoadWatch:
    """The engine's. `begin` and `end` are the thread's that loads, all else is one other thread's."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: rank_load_timeout_s."""
        self._limit_s = limit_s
        self._own: tuple[LoadProgress, int] | None = None  # while a load is watched; its thread's id

    def begin(self, progress: LoadProgress, numbers: list[int]) -> None:
        """progress: of this process, rank 0. numbers: of the other ranks."""
        now = time.monotonic()
        self._reports: dict[int, Report] = {}  # the latest
        self._since = dict.fromkeys((0, *numbers), now)  # each did something, or waited
        self._moved = now  # the last time that some rank did something, or could have
        self._own = progress, threading.get_ident()

    def end(self) -> None:
        self._own = None

    @property
    def numbers_at_work(self) -> list[int]:
        """Numbers of the other ranks that did not wait when they reported last."""
        return [number for number, report in sorted(self._reports.items()) if number and not report.waits]

    def look(self, reports: Mapping[int, Report]) -> tuple[int, str]:
        """The rank that is stuck and why, or (0, ""). reports: those that have come since the last look."""
        own = self._own
        if own is None:
            return 0, ""
        now = time.monotonic()
        for number, report in {**reports, 0: Report.of(*own)}.items():
            before = self._reports.get(number, report)
            has_moved = report.mark != before.mark
            if has_moved or report.waits:
                self._since[number] = now
            if has_moved or not report.waits:
                self._moved = now
            self._reports[number] = report
        number = min(self._since, key=lambda one: self._since[one])
        if now - self._since[number] > self._limit_s:
            last = self._reports[number].last if number in self._reports else ""
            done = f"after {last!r}" if last else "at its beginning"
            return number, f"has done nothing for {self._limit_s:g} s (rank_load_timeout_s), {done}"
        if now - self._moved > self._limit_s:
            return 0, f"waits for the others, which wait too, for {self._limit_s:g} s (rank_load_timeout_s)"
        return 0, ""


def _waits(thread_id: int) -> bool:
    """Whether the thread is in a call that waits for another rank or the engine."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_WAITING):
            return True
        frame = frame.f_back
    return False
