"""Large requests are read on a thread of their own: encoding a megabyte of text takes about half a second.

The input thread queues large requests here and continues; small requests it reads itself. One worker thread reads them
in order of arrival, but shorter ones before longer ones that came a little earlier: READING_BYTES_PER_S bytes count as
one second of later arrival. While it reads one above MAX_BESIDE_BYTES, which may take seconds, a second one reads the
others. Encoding releases the GIL, so that engine and output threads run meanwhile. A waiting request can be cancelled
or expire; one that is being read can be cancelled.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import FinishReason
from slipstream.protocol import wire

MAX_INLINE_BYTES = 8192  # of a request that the socket's own thread reads: at most some 8 ms
READING_BYTES_PER_S = 1 << 20  # about as many are read
MAX_BESIDE_BYTES = 1 << 18  # of a request that is read beside a longer one: a quarter of a second, 0.1 GB


def num_bytes(raw: wire.Request) -> int:
    """Memory of a request's tensors and texts; the cost of reading it grows with this.

    One character outside Unicode's first plane makes a text four bytes a character.
    """
    texts = sum(sys.getsizeof(value) for value in raw.parameters.values() if isinstance(value, str))
    return sum(len(tensor.data) for tensor in raw.inputs) + texts


class RequestHandler(Protocol):
    """Callbacks of RequestPool."""

    def parse(self, raw: wire.Request) -> Any: ...

    def deliver(self, handle: int, parsed: Any) -> None: ...

    def end(self, handle: int, known: Any, reason: FinishReason) -> None: ...

    def cancelled(self, handle: int) -> None: ...


@dataclass(slots=True)
class _Entry:
    """order: the lowest is read first."""

    raw: wire.Request
    known: Any
    deadline: float
    num_bytes: int
    order: float
    is_cancelled: bool = False


class RequestPool:
    """parse(request) and deliver(handle, parsed) run on the worker threads. end(handle, known, reason) answers a
    request that is not delivered, on the thread that cancels or expires it; known is the argument of `put`.
    cancelled(handle): a cancel came while the request was being read or delivered. They raise only OSError, when the
    backend is gone.
    """

    def __init__(self, handler: RequestHandler, max_requests: int, max_bytes: int) -> None:
        self._handler = handler
        self._max_requests = max(1, max_requests)  # the one that is read next is here too, though no other may wait
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: dict[int, _Entry] = {}  # by handle, the one being read included
        self._reading: set[int] = set()
        self._delivering: set[int] = set()  # of those being read
        self._is_reading_long = False
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_workers = 0

    def put(self, raw: wire.Request, deadline: float | None, known: Any = None) -> None:
        """Queue a request. deadline: time.monotonic(). Raises CapacityError if too many requests or bytes wait, or if
        there is no thread to read it, RequestError for more bytes than may ever wait."""
        size = num_bytes(raw)
        if size > self._max_bytes:
            raise RequestError("request", f"has {size} bytes, accepted: at most max_tokenizing_bytes={self._max_bytes}")
        with self._changed:
            if self._is_closed:
                raise CapacityError("the model is being unloaded")
            if len(self._entries) >= self._max_requests or self._num_bytes + size > self._max_bytes:
                raise CapacityError(
                    f"{len(self._entries)} requests of {self._num_bytes} bytes wait to be tokenised, this has {size}; "
                    f"max_waiting_requests={self._max_requests}, max_tokenizing_bytes={self._max_bytes}"
                )
            self._start_workers()
            order = time.monotonic() + size / READING_BYTES_PER_S
            self._entries[raw.handle] = _Entry(raw, known, math.inf if deadline is None else deadline, size, order)
            self._num_bytes += size
            self._changed.notify_all()

    def cancel(self, handle: int) -> bool:
        """Cancel a request: now, or as soon as it is read. Returns whether it was here."""
        with self._changed:
            entry = self._entries.get(handle)
            if entry is None:
                return False
            entry.is_cancelled = True
            if handle in self._reading:
                return True
            self._remove(handle)
        self._handler.end(handle, entry.known, FinishReason.CANCELLED)
        return True

    def expire(self) -> None:
        """Drop requests that have waited beyond their deadline."""
        if not self._entries:
            return
        now = time.monotonic()
        with self._changed:
            late = [entry for entry in self._entries.values() if entry.deadline <= now]
            late = [entry for entry in late if entry.raw.handle not in self._reading]
            for entry in late:
                self._remove(entry.raw.handle)
        for entry in late:
            self._handler.end(entry.raw.handle, entry.known, FinishReason.TIMEOUT)

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def wait_empty(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout)

    def close(self) -> list[int]:
        """Stop reading. Returns the handles of the waiting requests, which the caller answers.

        Waits for a delivery under way: a request that is refused there has its answer, one that is started is known.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._delivering)
            handles = list(self._entries)
            for handle in handles:
                self._remove(handle)
        return handles

    def _start_workers(self) -> None:
        """Start those that do not run yet: a model may never get a large request."""
        for name, is_beside in (("tokenize", False), ("tokenize-beside", True))[self._num_workers :]:
            try:
                threading.Thread(target=self._work, args=(is_beside,), name=name, daemon=True).start()
            except RuntimeError as error:
                raise CapacityError(f"there is no thread to tokenise the request: {error}") from None
            self._num_workers += 1

    def _remove(self, handle: int) -> None:
        entry = self._entries.pop(handle, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
        self._changed.notify_all()

    def _work(self, is_beside: bool) -> None:
        try:
            while self._read_next(is_beside):
                pass
        except OSError:
            self.close()  # the backend is gone: so are the clients

    def _read_next(self, is_beside: bool) -> bool:
        """Read one request. Returns False when the pool is closed."""
        self.expire()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next(is_beside) is not None)
            entry = None if self._is_closed else self._next(is_beside)
            if entry is None:
                return False
            if entry.deadline <= time.monotonic():
                return True
            handle = entry.raw.handle
            self._reading.add(handle)
            if not is_beside:
                self._is_reading_long = entry.num_bytes > MAX_BESIDE_BYTES
                self._changed.notify_all()
        parsed = self._handler.parse(entry.raw)
        self._finish(handle, entry, parsed, is_beside)
        return True

    def _next(self, is_beside: bool) -> _Entry | None:
        """The request that this worker reads next."""
        if is_beside and not self._is_reading_long:
            return None
        most = MAX_BESIDE_BYTES if is_beside else self._max_bytes
        waiting = (entry for handle, entry in self._entries.items() if handle not in self._reading)
        return min((one for one in waiting if one.num_bytes <= most), key=lambda one: one.order, default=None)

    def _finish(self, handle: int, entry: _Entry, parsed: object, is_beside: bool) -> None:
        """Deliver a read request. Its entry stays until then, so that no cancel is lost on the way to the engine."""
        with self._changed:
            was_cancelled = entry.is_cancelled
            is_delivered = handle in self._entries and not was_cancelled
            if is_delivered:
                self._delivering.add(handle)
            if not is_beside:
                self._is_reading_long = False
        try:
            if is_delivered:
                self._handler.deliver(handle, parsed)
        finally:
            with self._changed:
                is_here = handle in self._entries
                self._reading.discard(handle)
                self._delivering.discard(handle)
                self._remove(handle)
        if was_cancelled and is_here:
            self._handler.end(handle, entry.known, FinishReason.CANCELLED)
        elif entry.is_cancelled:
            self._handler.cancelled(handle)
