"""Calls that may hang, made on a thread of their own and waited for no longer than a limit.

One thread makes all calls of one model, one after the other: a call that hangs cannot be ended from here, and calls
beside it would pile up. A call's limit starts when it is made: one behind a call whose caller has left waits for its
turn. Once the call being made has passed its limit, every other fails at once, until it ends. Used by one thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")
_POLL_S = 0.05
# Whether the client has left is asked of the server, one more message beside the call, and the stub of server 2.51 does
# not bear many at a time (docs/LOG.md): so only calls that are slow ask.
_PATIENCE_S = 1.0


class CallTimeout(Exception):
    """No answer in time, or an earlier call still hangs."""


class CallAbandoned(Exception):
    """The one who waited has left."""


class _Call(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self.has_ended = threading.Event()
        self.is_wanted = True
        self.started = 0.0
        self._result: Result | None = None
        self._error: BaseException | None = None

    def make(self) -> None:
        """On the calling thread. Errors go to the one who waits."""
        try:
            if self.is_wanted:
                self._result = self._work()
        except BaseException as error:
            self._error = error
        self.has_ended.set()

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class TimedCalls:
    """name: of what is called, for its thread and for logs."""

    def __init__(self, name: str, timeout_s: float, patience_s: float = _PATIENCE_S) -> None:
        self.name, self._timeout_s, self._patience_s = name, timeout_s, patience_s
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._made: _Call | None = None  # the one being made, or the last; set by the calling thread
        threading.Thread(target=self._make_all, daemon=True, name=f"calls of {name}").start()

    def run(self, work: Callable[[], Result], is_abandoned: Callable[[], bool]) -> Result:
        """What work gives, or its exception.  Raises CallTimeout, and CallAbandoned when is_abandoned."""
        if self._left_s() <= 0:
            raise CallTimeout("an earlier call still has no answer")
        call = _Call(work)
        self._queue.put(call)
        asked = time.monotonic()
        while not call.has_ended.wait(max(0.0, min(_POLL_S, self._left_s()))):
            if time.monotonic() - asked > self._patience_s and is_abandoned():
                call.is_wanted = False
                raise CallAbandoned
            if self._left_s() <= 0:
                call.is_wanted = False
                limit = f"no answer in {self._timeout_s * 1e3:.0f} ms"
                raise CallTimeout(limit if self._made is call else f"an earlier call: {limit}")
        return call.result()

    def _left_s(self) -> float:
        """How much of its limit the call that is being made has left; all of it when there is none."""
        call = self._made
        if call is None or call.has_ended.is_set():
            return self._timeout_s
        return call.started + self._timeout_s - time.monotonic()

    def _make_all(self) -> None:
        while True:
            call = self._queue.get()
            call.started = time.monotonic()
            self._made = call
            call.make()
