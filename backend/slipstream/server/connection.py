"""HTTP connections that nobody can hold open by doing nothing: time limits to send a request and to read an answer.

uvicorn limits only the idle time between requests. Without these a client that sends one byte a minute, or never reads,
keeps a connection, and with it a request and its KV blocks. Event loop thread.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.server.errors import error_body
from slipstream.server.options import GatewayOptions


class GatewayConfig(uvicorn.Config):
    """uvicorn's settings and ours; pickled to worker processes."""

    def __init__(self, options: GatewayOptions, **settings: Any) -> None:
        super().__init__(**settings)
        self.options = options


class BoundedConnection(HttpToolsProtocol):
    def __init__(self, config: GatewayConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._limits = config.options
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._is_in_request = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self._limits.header_timeout_s, "its headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reading is None and not self._is_in_request:
            self._expect(self._limits.header_timeout_s, "its headers")
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._is_in_request = True
        self._expect(self._limits.body_timeout_s, "its body")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_request = False
        self._expect_nothing()
        super().on_message_complete()

    def _expect(self, seconds: float, what: str) -> None:
        self._expect_nothing()
        self._reading = self.loop.call_later(
            seconds, self._give_up, f"The client took more than {seconds:g} s for {what}"
        )

    def _expect_nothing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _give_up(self, message: str) -> None:
        if self.transport.is_closing():
            return
        body = json.dumps(error_body(408, message, "request_timeout")).encode()
        head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()
