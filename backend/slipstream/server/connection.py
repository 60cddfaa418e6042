"""HTTP connections with limits on time, number and bytes, enforced as the bytes arrive.

uvicorn limits only the idle time between requests; it keeps a URL and headers of any length. Here a connection is
refused and closed before it keeps more than its limits, per connection and per worker; connections that wait for their
clients are closed first (connection_pool.py). A refusal is counted, and is a JSON error unless an answer is being sent.
A client that leaves is noticed even while uvicorn does not read. Event loop thread.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
from collections import deque
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slipstream.server.backlog import READER, num_acked_bytes
from slipstream.server.connection_pool import LEAST_READ_BYTES, ConnectionPool, turned_away
from slipstream.server.errors import RETRY_AFTER_S, error_body
from slipstream.server.handover import HAND_OVER, HANDED_OVER, as_sent, give
from slipstream.server.metrics import Metrics
from slipstream.server.open_ended import until_the_end
from slipstream.server.options import GatewayOptions
from slipstream.server.plain_parser import PlainParser

MAX_PIPELINED_REQUESTS = 16  # requests sent before an earlier answer; each costs some kB at any length
_PIECE_BYTES = 1 << 14  # bytes per call of the parser, by which a limit may be exceeded
_LINE_BYTES = 4  # colon, space and line end, which belong to a header, too
_DRAIN_PERIOD_S = 0.01
_HANGUP_PERIOD_S = 1.0  # between two checks for a client that has left
# of max_total_body_bytes: what bodies that are not complete may have, and what is left to them once they have more
_UNFINISHED, _LEFT_UNFINISHED = 0.75, 0.7


class GatewayConfig(uvicorn.Config):
    """uvicorn's settings and ours, for all connections of a worker. queue: to the reader, None in that itself.
    is_ending: the worker ends, and so may the reader."""

    def __init__(self, options: GatewayOptions, metrics: Metrics, queue: socket.socket | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.options, self.metrics, self.queue = options, metrics, queue
        self.pool = ConnectionPool()
        self.is_ending = False


class BoundedConnection(HttpToolsProtocol):
    url = b""  # until a request begins

    def __init__(self, config: GatewayConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.parser = PlainParser(self, self._plain_head)  # type: ignore[assignment]
        self._limits, self._metrics, self._pool = config.options, config.metrics, config.pool
        self._config, self._queue = config, config.queue
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._hangup: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # its answer is under way; uvicorn knows the latest only
        self._num_waiting_bytes = 0  # of events behind what was sent
        self._is_next_held = False  # until the client has read the answer
        self._is_in_head = False
        self._is_in_request = False  # its headers are complete, its body is not
        self._is_refused = False
        self._num_headers = 0  # of the request that is being read, as the next two
        self._num_header_bytes = 0
        self._num_unparsed_bytes = 0  # the parser keeps a header until the next one begins
        self._has_progress = False  # the parser gave us something of the last piece
        self._unanswered: deque[int] = deque()  # bytes of the headers of requests that are complete, in order
        self.num_kept_bytes = 0  # part of the pool's num_bytes
        self.num_body_bytes = 0  # likewise
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._pool.enter(self)
        if len(self.connections) > self._limits.max_connections:
            other = self._pool.longest_waiting(self)
            if other is None:
                return self._refuse(*turned_away(self._limits, "max_connections"))
            other.give_way("max_connections")
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_refused = True
        self._expect_nothing()
        self._keep_nothing()
        self._pool.leave(self)
        self.resume_writing()
        if self._hangup is not None:
            self._hangup.cancel()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    # ---- bytes in

    def data_received(self, data: bytes) -> None:
        if self._reading is None and not self._is_in_request and not self._is_refused:
            self._expect_headers()
        for start in range(0, len(data), _PIECE_BYTES):
            if self._is_refused or self.transport.is_closing():
                return
            piece = data[start : start + _PIECE_BYTES]
            self._has_progress = False
            super().data_received(piece)
            if not self._has_progress:
                self._num_unparsed_bytes += len(piece)
            else:
                self._num_unparsed_bytes = len(piece) if self._is_in_head else 0
            if self._num_unparsed_bytes > self._limits.max_header_bytes:
                self._refuse_header_bytes()
            self._share()

    def on_message_begin(self) -> None:
        self._is_in_head = self._has_progress = True
        self._num_headers = self._num_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        limit = self._limits.max_url_bytes
        if self._is_refused or not self._count(len(url)):
            return
        if len(self.url) + len(url) > limit:
            message = f"The URL is too long, accepted: at most {limit} bytes (--max-url-bytes)"
            return self._refuse(414, message, "max_url_bytes")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a complete header; trailers after a chunked body are counted and dropped."""
        if self._is_refused or not self._count(len(name) + len(value) + _LINE_BYTES):
            return
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            accepted = f"accepted: at most {self._limits.max_headers} (--max-headers)"
            return self._refuse(431, f"The request has too many headers, {accepted}", "max_headers")
        if not self._is_in_request:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_refused or self._asks_for_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            return self._refuse(503, "too many requests without waiting for an answer", "max_pipelined_requests")
        codings = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
        if codings.strip().lower() not in (b"", b"chunked"):
            told = f"transfer-encoding: got {codings.decode('latin-1')[:64]!r}, accepted: chunked"
            return self._refuse(501, told, "malformed")
        self._has_progress, self._is_in_head, self._is_in_request = True, False, True
        self._unanswered.append(self._num_header_bytes)
        self._expect(self._limits.body_timeout_s, "its body", "body_timeout_s")
        super().on_headers_complete()
        if self.pipeline and self._hangup is None:
            self._watch_for_hangup()

    def _asks_for_upgrade(self) -> bool:
        """Whether the request that was read will be read again; CONNECT, which has no body, is not."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _plain_head(self) -> bytes:
        """That request's, as one that asks for no other protocol."""
        if self._is_refused or not self._asks_for_upgrade():
            return b""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        extensions: dict[str, Any] = {HANDED_OVER: {}} if self._queue is None else {HAND_OVER: self._hand_over}
        cycle.scope["extensions"] = extensions | {READER: self}
        is_old = cycle.scope["http_version"] == "1.0"
        framed: Any = until_the_end(cycle, app) if is_old else app
        super()._start_asgi_task(cycle, framed)

    def _watch_for_hangup(self) -> None:
        """Poll for a disconnect: nothing is read while a request waits for an earlier answer."""
        self._hangup = None
        if self._is_refused or not self.pipeline:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if poll.poll(0):
            return self.transport.abort()
        self._hangup = self.loop.call_later(_HANGUP_PERIOD_S, self._watch_for_hangup)

    def on_chunk_header(self) -> None:
        self._has_progress = True

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        if not self._is_refused and not self.cycle.response_complete:  # what comes behind an answer is dropped
            self._share_body(self.num_body_bytes + len(body))
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progress = True
        if not self._is_refused and not self._asks_for_upgrade():
            self._is_in_request = False
            self._expect_nothing()
            self._share_body(0)
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        self._share()
        if self.flow.write_paused and not self.transport.is_closing():
            self._is_next_held = True  # its answer would wait beside this one
            return self.flow.pause_reading()
        self._go_on()

    def _go_on(self) -> None:
        self._is_next_held = False
        if self._reading is None and not self.pipeline:
            self._pool.mark_idle(self)
        super().on_response_complete()

    # ---- counts

    def _count(self, num_bytes: int) -> bool:
        """Count bytes of a URL or header before they are kept. False: above the limit, the request was refused."""
        self._has_progress = True
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._refuse_header_bytes()
        return not self._is_refused

    def _share(self) -> None:
        """Update this connection's share of the worker's bytes; above the limit, close a connection."""
        num_bytes = sum(self._unanswered) + self._num_unparsed_bytes
        num_bytes += self._num_header_bytes if self._is_in_head else 0
        has_grown = num_bytes > self.num_kept_bytes
        self._pool.num_bytes += num_bytes - self.num_kept_bytes
        self.num_kept_bytes = num_bytes
        while has_grown and self._pool.num_bytes > self._limits.max_total_header_bytes:
            other = self._pool.largest_head(self)
            if other is None:
                return self._refuse(*turned_away(self._limits, "max_total_header_bytes"))
            other.give_way("max_total_header_bytes")

    def _share_body(self, num_bytes: int) -> None:
        """Update this connection's share of the worker's incomplete bodies; above the limit, close the largest ones: a
        client that never ends its body must not keep out those that do."""
        pool, limit = self._pool, self._limits.max_total_body_bytes
        pool.num_body_bytes += num_bytes - self.num_body_bytes
        self.num_body_bytes = num_bytes
        if num_bytes and pool.num_body_bytes > _UNFINISHED * limit:
            for connection in pool.by_body():
                if pool.num_body_bytes > _LEFT_UNFINISHED * limit:
                    connection.give_way("max_total_body_bytes")

    def _keep_nothing(self) -> None:
        self._share_body(0)
        self._is_in_head, self._num_unparsed_bytes = False, 0
        self._unanswered.clear()
        self._share()

    # ---- the reader

    async def _hand_over(self, scope: Scope, body: list[bytes]) -> bool:
        """Let the reader answer this request: the connection is its from then on. False: the reader may be gone.
        Raises BusyError."""
        assert self._queue is not None
        deadline = self.loop.time() + self._limits.send_timeout_s
        while self.transport.get_write_buffer_size():  # of an earlier answer
            if self.loop.time() > deadline:
                self.stop_sending("send_timeout_s")
            await asyncio.sleep(_DRAIN_PERIOD_S)
        if self._config.is_ending:
            return False
        if not self.transport.is_closing():
            await give(self._queue, self.transport.get_extra_info("socket"), as_sent(scope, body))
            self.transport.abort()
        await asyncio.sleep(0)  # until the connection knows that it is lost
        return True

    # ---- time

    def _expect_headers(self) -> None:
        self._expect(self._limits.header_timeout_s, "its headers", "header_timeout_s")

    def _expect(self, seconds: float, what: str, reason: str) -> None:
        self._expect_nothing()
        message = f"The client took more than {seconds:g} s for {what}"
        self._reading = self.loop.call_later(seconds, self._refuse, 408, message, reason, "request_timeout")
        self._pool.mark_reading(self)

    def _expect_nothing(self) -> None:
        self._pool.mark_busy(self)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._await_reading(self.num_read_bytes)
        self.keep(0)

    def _await_reading(self, num_before: int) -> None:
        self._writing = self.loop.call_later(self._limits.send_timeout_s, self._check_reading, num_before)

    def _check_reading(self, num_before: int) -> None:
        """A client that reads may take its time."""
        if (num_read := self.num_read_bytes) - num_before < LEAST_READ_BYTES:
            return self.stop_sending("send_timeout_s")
        self._await_reading(num_read)

    @property
    def is_behind(self) -> bool:
        return self.flow.write_paused

    def keep(self, num_bytes: int) -> None:
        """So many bytes more, or fewer, wait until what was sent before is read. Above the total, some answers end."""
        self._num_waiting_bytes += num_bytes
        if num_bytes >= 0:
            for other in self._pool.mark_unread(self, self._limits.max_total_answer_bytes):
                other.stop_sending("max_total_answer_bytes")

    @property
    def num_unread_bytes(self) -> int:
        return self.transport.get_write_buffer_size() + self._num_waiting_bytes

    @property
    def num_read_bytes(self) -> int:
        """Since the connection was made."""
        return num_acked_bytes(self.transport.get_extra_info("socket"))

    def stop_sending(self, reason: str) -> None:
        self._metrics.count_refusal(reason)
        self.transport.abort()

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        self._pool.mark_read(self)
        super().resume_writing()
        if self._is_next_held:
            self._go_on()

    # ---- the end

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "malformed")

    def _refuse_header_bytes(self) -> None:
        accepted = f"accepted: at most {self._limits.max_header_bytes} bytes (--max-header-bytes)"
        self._refuse(431, f"The request's headers are too large, {accepted}", "max_header_bytes")

    def may_give_way(self) -> bool:
        return not self._is_refused and not self.transport.is_closing() and self._may_answer()

    def give_way(self, reason: str) -> None:
        """Close this connection in favour of others, without an answer if it is idle."""
        if self._reading is not None:
            self._refuse(*turned_away(self._limits, reason))
        else:
            self._metrics.count_refusal(reason)
            self._is_refused = True
            self._pool.mark_busy(self)
            self.transport.close()
        self._keep_nothing()

    def _refuse(self, status: int, message: str, reason: str, code: str = "invalid_request") -> None:
        """Send the reason, unless an earlier answer is being sent, and close; nothing more is read."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._metrics.count_refusal(reason)
        self._expect_nothing()
        if self._may_answer():
            body = json.dumps(error_body(self._path(), status, message, code)).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n"
            if status == 503:
                head += f"retry-after: {RETRY_AFTER_S}\r\n"
            self.transport.write(head.encode() + b"\r\n" + body)
        self.transport.close()

    def _path(self) -> str:
        """The path of the latest request, as far as it was read."""
        return self.url.partition(b"?")[0].decode("latin-1")

    def _may_answer(self) -> bool:
        """Whether no earlier answer is outstanding and this request has none yet."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        return self._is_in_request and not self.pipeline and not self.cycle.response_started
