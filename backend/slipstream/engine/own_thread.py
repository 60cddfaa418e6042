"""A thread for the calls of a model of several ranks, so that who waits for a call is told when it cannot end.

On a GPU a call may wait for ever for a kernel that waits for a lost rank, and no exception reaches its thread there.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from concurrent.futures import TimeoutError as WaitTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

_WAIT_S = 1.0  # at most, until Ctrl-C is noticed


class OwnThread:
    """Runs the calls of any threads, one after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._underway: set[Future[Any]] = set()
        self._lost: Exception | None = None
        threading.Thread(target=self._run, name="engine", daemon=True).start()  # the process may end while it waits

    def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises, or that with which it was given up."""
        future: Future[T] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._underway.add(future)
        self._calls.put((call, future))
        try:
            while not future.done():  # Python handles a signal that came just before a wait when the wait ends
                with suppress(WaitTimeoutError):
                    future.exception(_WAIT_S)
            return future.result()
        finally:
            with self._lock:
                self._underway.discard(future)

    def give_up(self, error: Exception) -> None:
        """Raise this in all who wait, and who call from now on; nothing if nobody waits. Any thread."""
        with self._lock:
            waiting = list(self._underway)
            self._lost = error if waiting else self._lost
        for future in waiting:
            with suppress(InvalidStateError):  # it has ended just now
                future.set_exception(error)

    def close(self, last: Callable[[], object], limit_s: float) -> None:
        """Make a last call, for which a call that was given up has at most so long to end, and end the thread. Raises
        what the call raises."""
        ended: Future[object] = Future()
        self._calls.put((last, ended))
        self._calls.put((_end, Future()))
        wait([ended], limit_s if self._lost is not None else None)
        if ended.done():
            ended.result()
        else:  # what the thread holds is free when it gets there, or the process ends
            logger.error("the engine's thread is stuck: %s", self._lost)

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            if call is _end:
                return
            try:
                result = call()
            except BaseException as error:
                with suppress(InvalidStateError):
                    future.set_exception(error)
            else:
                with suppress(InvalidStateError):  # given up
                    future.set_result(result)
            del call, future


def _end() -> None:
    """A call that ends the thread."""
