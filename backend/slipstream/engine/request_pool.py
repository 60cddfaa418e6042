"""Large requests are read on a thread of their own: encoding a megabyte of text takes about half a second.

The reading thread of the socket puts them in and goes on; a small request never comes here. One worker reads in the
order of arrival; encoding releases Python's lock, so that engine and output threads run beside it. Cancels and
deadlines are heard while a request waits, a cancel also while it is read.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.core.errors import CapacityError
from slipstream.core.request import FinishReason
from slipstream.protocol import wire

MAX_INLINE_BYTES = 8192  # of a request that the socket's own thread reads: at most some 8 ms


def num_bytes(raw: wire.Request) -> int:
    """What reading a request costs grows with this."""
    texts = sum(len(value) for value in raw.parameters.values() if isinstance(value, str))
    return sum(len(tensor.data) for tensor in raw.inputs) + texts


class Steps(Protocol):
    """What is done with a request; see RequestPool."""

    def parse(self, raw: wire.Request) -> Any: ...

    def deliver(self, handle: int, parsed: Any) -> None: ...

    def end(self, handle: int, known: Any, reason: FinishReason) -> None: ...

    def cancelled(self, handle: int) -> None: ...


@dataclass(slots=True)
class _Entry:
    raw: wire.Request
    known: Any
    deadline: float
    num_bytes: int
    is_cancelled: bool = False


class RequestPool:
    """parse(request) and deliver(handle, parsed) run on the worker; end(handle, known, reason) answers a request that
    is never delivered, on the thread that notices; known is what `put` was told of it. They raise nothing but OSError,
    when the backend is gone.

    cancelled(handle): a cancel came while the request was being read or delivered.
    """

    def __init__(self, steps: Steps, max_requests: int, max_bytes: int) -> None:
        self._steps = steps
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by handle, the one being read included
        self._reading = -1
        self._changed = threading.Condition()
        self._is_closed = False
        self._worker: threading.Thread | None = None

    def put(self, raw: wire.Request, deadline: float | None, known: Any = None) -> None:
        """Raises CapacityError when too many wait, or too large ones. deadline: on the monotonic clock."""
        size = num_bytes(raw)
        with self._changed:
            if self._is_closed:
                raise CapacityError("the model is being unloaded")
            if len(self._entries) >= self._max_requests or self._num_bytes + size > self._max_bytes:
                raise CapacityError(
                    f"{len(self._entries)} requests of {self._num_bytes} bytes wait to be tokenised, this has {size}; "
                    f"max_waiting_requests={self._max_requests}, max_tokenizing_bytes={self._max_bytes}"
                )
            self._entries[raw.handle] = _Entry(raw, known, math.inf if deadline is None else deadline, size)
            self._num_bytes += size
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="tokenize", daemon=True)
                self._worker.start()
            self._changed.notify_all()

    def cancel(self, handle: int) -> bool:
        """Whether the request is here; then it is dropped, or cancelled as soon as it is read."""
        with self._changed:
            entry = self._entries.get(handle)
            if entry is None:
                return False
            entry.is_cancelled = True
            if handle == self._reading:
                return True
            self._remove(handle)
        self._steps.end(handle, entry.known, FinishReason.CANCELLED)
        return True

    def expire(self) -> None:
        """Drop what has waited beyond its deadline."""
        if not self._entries:
            return
        now = time.monotonic()
        with self._changed:
            late = [entry for entry in self._entries.values() if entry.deadline <= now]
            late = [entry for entry in late if entry.raw.handle != self._reading]
            for entry in late:
                self._remove(entry.raw.handle)
        for entry in late:
            self._steps.end(entry.raw.handle, entry.known, FinishReason.TIMEOUT)

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def wait_empty(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout)

    def close(self) -> list[int]:
        """Read nothing more; returns the handles that are still here; the caller answers them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            handles = list(self._entries)
            for handle in handles:
                self._remove(handle)
        return handles

    def _remove(self, handle: int) -> None:
        entry = self._entries.pop(handle, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            while self._read_next():
                pass
        except OSError:
            self.close()  # the backend is gone: so are the clients

    def _read_next(self) -> bool:
        """False: the pool is closed."""
        self.expire()
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._is_closed)
            if self._is_closed:
                return False
            handle, entry = next(iter(self._entries.items()))
            if entry.deadline <= time.monotonic():
                return True
            self._reading = handle
        parsed = self._steps.parse(entry.raw)
        self._finish(handle, entry, parsed)
        return True

    def _finish(self, handle: int, entry: _Entry, parsed: object) -> None:
        """The entry stays until it is delivered, so that a cancel is never lost between here and the engine."""
        was_cancelled = entry.is_cancelled
        if handle in self._entries and not was_cancelled:
            self._steps.deliver(handle, parsed)
        with self._changed:
            is_here = handle in self._entries
            self._remove(handle)
            self._reading = -1
        if was_cancelled and is_here:
            self._steps.end(handle, entry.known, FinishReason.CANCELLED)
        elif entry.is_cancelled:
            self._steps.cancelled(handle)
