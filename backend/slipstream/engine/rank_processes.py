"""The processes of this machine's other ranks, which the engine starts before it imports torch: all import at once.

Until it is told its part, a rank's process only imports (rank_main.py). Imports no torch. One thread starts and watches
the processes; engine thread, except where noted.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from slipstream.core.config import ParallelConfig
from slipstream.core.errors import EngineError
from slipstream.engine.child_process import start_process
from slipstream.engine.load_watch import Report

MOST_AHEAD = 8  # ranks of a machine that are started before it is known whether it has a device for each
_WATCH_PERIOD_S = 0.5  # a rank that is stopped at two looks in a row is lost
_END_TIMEOUT_S = 5.0  # for all together
FAILED, BROKEN = "failed", "broken"  # what a rank says that cannot load: by itself, or because a call to others failed
DONE = "done"  # of one of ANSWERED_CALLS
ANSWERED_CALLS = ("sleep",)  # that the first rank waits for; others end in calls between ranks, or need no end
LOADING_CALLS = ("wake",)  # that take as long as a load, and are watched like one
_START = "import sys; sys.path[:] = {path!r}; from slipstream.engine.rank_main import main; main()"


class RankConnection(Protocol):
    """What the messages of a rank are read from."""

    number: int

    def poll(self, timeout_s: float) -> tuple[str, Any] | None: ...


class RankFailure(EngineError):
    """What another rank says of its load, which has failed. is_own: not just because another rank's has."""

    def __init__(self, number: int, reason: str, is_own: bool) -> None:
        super().__init__(f"rank {number}: {reason}")
        self.number, self.is_own = number, is_own


class RankProcess:
    """The process of one other rank, and the connection to it. The process ends with the thread that makes this."""

    def __init__(self, number: int) -> None:
        self.number = number
        (ours, theirs), (our_reports, their_reports) = socket.socketpair(), socket.socketpair()
        path = [place for place in sys.path if place]  # without the current directory, for safety
        fds = theirs.fileno(), their_reports.fileno()
        arguments = [str(fds[0]), str(os.getpid()), str(fds[1])]
        self._process = start_process([sys.executable, "-c", _START.format(path=path), *arguments], fds)
        theirs.close()
        their_reports.close()
        self.connection, self._reports = Connection(ours.detach()), Connection(our_reports.detach())
        self._has_part = self._was_stopped = False
        self.end = _end_of(self._process.pid)

    def begin(self, setup: object) -> None:
        """Tell it its part, a rank_process.RankSetup. Raises OSError if the process has ended."""
        self._has_part = True
        self.send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL))

    def send(self, message: bytes) -> None:
        """message: pickled."""
        self.connection.send_bytes(message)

    def receive(self, kind: str, timeout_s: float | None = None) -> Any:
        """The value of the next message. Raises RankFailure if the rank cannot load, EngineError if it is silent or has
        ended."""
        try:
            if not self.connection.poll(timeout_s):
                raise EngineError(f"rank {self.number} has said nothing for {timeout_s:g} s")
            message = self.connection.recv()
        except (EOFError, OSError):
            raise EngineError(f"rank {self.number}: its process has ended; the server's log may say why") from None
        return value_of(self.number, message, kind)

    def poll(self, timeout_s: float) -> tuple[str, Any] | None:
        """The next message, None if there is none, or the process ended without one."""
        try:
            return self.connection.recv() if self.connection.poll(timeout_s) else None
        except (EOFError, OSError):
            return None

    def report(self) -> Report | None:
        """The latest of a load that has come since the last call; see load_watch.py. Any one thread."""
        found = None
        try:
            while self._reports.poll(0.0):
                found = Report.received(*self._reports.recv())
        except (EOFError, OSError):
            pass  # its loss is found otherwise
        return found

    def loss(self) -> str:
        """What has become of the process, "" if it runs. Any one thread."""
        try:
            options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            state = os.waitid(os.P_PID, self._process.pid, options)
        except ChildProcessError:
            return f"rank {self.number} has ended"
        if state is None:
            self._was_stopped = False
            return ""
        if state.si_code != os.CLD_STOPPED:
            return f"rank {self.number} has ended"
        was_stopped, self._was_stopped = self._was_stopped, True
        return f"rank {self.number} is stopped" if was_stopped else ""

    def kill(self) -> None:
        """Any thread."""
        self._process.kill()

    def hang_up(self) -> None:
        """Have the process end. One that has a part does so by itself when the connection ends; others may be
        importing."""
        if not self._has_part:
            self.kill()
        self.connection.close()

    def wait(self, limit: float) -> None:
        """For its end, which is forced at `limit`, of time.monotonic()."""
        try:
            self._process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reports.close()


class RankProcesses:
    """Those of this machine beside the engine's, and the thread with which they end."""

    def __init__(self) -> None:
        self.ranks: list[RankProcess] = []
        self._look: Callable[[], bool] = lambda: False
        self._thread: threading.Thread | None = None
        self._watched, self._closed = threading.Event(), threading.Event()

    @classmethod
    def ahead(cls, parallel: ParallelConfig) -> RankProcesses:
        """Started already, if the model has several ranks, and not so many here that they may well be refused."""
        found = cls()
        if parallel.num_ranks > 1 and parallel.devices_per_node <= MOST_AHEAD:
            found.start(parallel.devices_per_node)
        return found

    def start(self, num_local: int) -> None:
        """Start the ranks from the second on, unless that is done. num_local: ranks of this machine. Raises OSError."""
        if self._thread is not None:
            return
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(num_local, started), name="ranks", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:  # also of a signal meanwhile
            started.exception()  # waits: after this no process begins
            self.close()
            raise

    def watch(self, look: Callable[[], bool]) -> None:
        """From now on have the thread call `look` twice a second, and at once when a process has ended, until it says
        that there is nothing to look after any more."""
        self._look = look
        self._watched.set()

    def close(self) -> None:
        """End them. Any number of times."""
        self._look = lambda: False
        for rank in self.ranks:
            rank.hang_up()
        limit = time.monotonic() + _END_TIMEOUT_S
        for rank in self.ranks:
            rank.wait(limit)
        self.ranks = []
        self._closed.set()  # last: the kernel kills those that still run when their thread ends
        self._watched.set()

    def _run(self, num_local: int, started: Future[None]) -> None:
        """The thread with which the processes end, so it lives as long as they may."""
        ends: list[int] = []
        try:
            for number in range(1, num_local):
                rank = RankProcess(number)
                self.ranks.append(rank)
                if rank.end is not None:
                    ends.append(rank.end)
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
        self._watched.wait()
        is_watching = True
        while not self._closed.is_set():
            if is_watching:
                wait(ends, _WATCH_PERIOD_S)  # an end is found at once, also while nothing runs
            else:
                self._closed.wait(_WATCH_PERIOD_S)
            is_watching = self._look()
        for end in ends:
            os.close(end)


def value_of(number: int, message: tuple[str, Any], kind: str) -> Any:
    """The value of a rank's message of this kind. Raises RankFailure, also for another kind."""
    found, value = message
    if found != kind:
        raise RankFailure(number, str(value), is_own=found == FAILED)
    return value


def failure_of(rank: RankConnection) -> RankFailure | None:
    """What the rank has said of a failure. All that it said before is dropped. Any one thread."""
    while (found := rank.poll(0.0)) is not None:
        if found[0] in (FAILED, BROKEN):
            return RankFailure(rank.number, str(found[1]), is_own=found[0] == FAILED)
    return None


def _end_of(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
