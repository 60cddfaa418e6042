"""Hands a connection, with the request that it has brought, from one process of the gateway to another.

The giving process sends two descriptors through a queue that both know: the client's socket, and one from which the
taking process reads the request. The client notices nothing; its connection ends with the answer. Event loop thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from starlette.types import Scope

HAND_OVER, HANDED_OVER = "slipstream.hand_over", "slipstream.handed_over"  # extensions of a scope
ADDED_HEADERS, ADDED_HEADER_BYTES = 2, 64  # at most, by `as_sent`
_TRANSFER_S = 30.0  # the other process may have to start first
_LENGTH_BYTES = 8
_READ_BYTES = 1 << 18
_REPLACED = frozenset({b"content-length", b"transfer-encoding", b"connection", b"expect"})


class BusyError(Exception):
    """The other process takes no request now."""


def make_queue() -> tuple[socket.socket, socket.socket]:
    """(giving end, taking end), each for any number of processes. What was given waits until it is taken."""
    giving, taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (giving, taking):
        end.setblocking(False)
    return giving, taking


def as_sent(scope: Scope, body: Sequence[bytes]) -> list[bytes]:
    """The request as its client would send it for one answer alone, in parts."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%s %s HTTP/%s" % (scope["method"].encode(), target, scope["http_version"].encode())]
    lines += [b"%s: %s" % (name, value) for name, value in scope["headers"] if name not in _REPLACED]
    lines += [b"connection: close", b"content-length: %d" % sum(map(len, body)), b"", b""]
    return [b"\r\n".join(lines), *body]


async def give(queue: socket.socket, client: socket.socket, request: Sequence[bytes]) -> None:
    """Returns when the kernel or the other process has all of it. Raises BusyError."""
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            socket.send_fds(queue, [b"\0"], [client.fileno(), theirs.fileno()])
            theirs.close()
            await asyncio.wait_for(_send(ours, request), _TRANSFER_S)
    except (OSError, asyncio.TimeoutError):
        raise BusyError from None


async def take(queue: socket.socket) -> tuple[socket.socket, bytes] | None:
    """A client and its request. None if there is none, or its giver did not end what it began."""
    try:
        _, descriptors, _, _ = socket.recv_fds(queue, 1, 2)
    except BlockingIOError:  # another has taken it
        return None
    if len(descriptors) != 2:  # no more files may be open here
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    client, source = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    try:
        with source:
            source.setblocking(False)
            return client, await asyncio.wait_for(_read(source), _TRANSFER_S)
    except (OSError, EOFError, asyncio.TimeoutError):
        client.close()
        return None


async def _send(target: socket.socket, request: Sequence[bytes]) -> None:
    loop = asyncio.get_running_loop()
    for part in (sum(map(len, request)).to_bytes(_LENGTH_BYTES, "little"), *request):
        if part:  # the last of a body in chunks is empty; sent after the other process has read all, it would fail
            await loop.sock_sendall(target, part)


async def _read(source: socket.socket) -> bytes:
    """Raises EOFError if there is less than was promised."""
    loop, data, length = asyncio.get_running_loop(), bytearray(), _LENGTH_BYTES
    while len(data) < length:
        piece = await loop.sock_recv(source, _READ_BYTES)
        if not piece:
            raise EOFError
        data += piece
        if length == _LENGTH_BYTES <= len(data):
            length += int.from_bytes(data[:_LENGTH_BYTES], "little")
    return bytes(data[_LENGTH_BYTES:])
