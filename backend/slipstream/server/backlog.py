"""Events of a stream whose client reads too slowly: they wait here, where their bytes count, not in Triton.

Triton keeps without a bound what a model has sent and nobody has read: two such streams grew it by 0.8 GB. Event loop
thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

from starlette.types import Message, Scope, Send

READER = "slipstream.reader"  # extension of a scope: the client, as this module sees it
_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info


class SlowReader(Protocol):
    """is_behind: something that was sent waits to be read. keep(n): n bytes more wait, or fewer."""

    @property
    def is_behind(self) -> bool: ...

    def keep(self, num_bytes: int) -> None: ...


class Backlog:
    """`send` of a streamed answer that returns at once, except for its last part."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._reader: SlowReader | None = scope.get("extensions", {}).get(READER)
        self._waiting: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        reader = self._reader
        if reader is not None and message.get("more_body") and (self._sending is not None or reader.is_behind):
            self._waiting.append(message["body"])
            reader.keep(len(message["body"]))
            if self._sending is None:
                self._sending = asyncio.create_task(self._send_waiting(reader))
            return
        if self._sending is not None:
            await self._sending
        await self._send(message)

    def end(self) -> None:
        """Forget what waits."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_waiting(self, reader: SlowReader) -> None:
        """In one piece each time that the client has read the last one: buffers of many pieces cost asyncio more."""
        try:
            while self._waiting:
                data, self._waiting = b"".join(self._waiting), []
                try:
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
                finally:
                    reader.keep(-len(data))
        finally:
            self._sending = None


def num_acked_bytes(connection: socket.socket) -> int:
    """Bytes that the client's machine has taken of all that was sent; 0 where the kernel does not say."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    return struct.unpack_from("Q", info, _BYTES_ACKED)[0] if len(info) == _BYTES_ACKED + 8 else 0
