"""Connections of the engine and ranks of other nodes: both ends prove that they know a secret, then exchange frames.

The secret never crosses the network, and what arrives is trusted only behind a check that needs it: steps are pickled.
Contents are not encrypted. A message is one frame, or several if it is long: a step may bring an adapter of gigabytes.
A frame is a header (4 bytes, little-endian: its length, and the highest bit if another one follows), a part of the
message and an HMAC-SHA256 of a counter, the header and the part, with a key of this connection and direction. Standard
library only; any one thread an end.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import time
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, EngineError

MAX_FRAME_BYTES = 64 << 20  # what is read before it is checked
MAX_REPLY_BYTES = 1 << 16  # a message from a rank; of those from the engine, which a rank trusts, the length is any
MIN_SECRET_BYTES = 16
HANDSHAKE_TIMEOUT_S = 5.0
_MAX_SECRET_BYTES = 4096
_MAX_HELLO_BYTES = 1024
_GREETING = b"slipstream ranks 2\n"
_NONCE_BYTES = _TAG_BYTES = 32
_HAS_NEXT = 1 << 31
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 5),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
)


class LinkError(EngineError):
    """The other end is not what it should be."""


class Link:
    """A connection whose ends know each other."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes, max_bytes: int | None) -> None:
        """max_bytes: of a message that is received; None: any number."""
        self._connection, self._max_bytes = connection, max_bytes
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0

    @property
    def local_address(self) -> str:
        address: str = self._connection.getsockname()[0]
        return address

    def send(self, message: bytes) -> None:
        """Raises OSError if the connection has ended."""
        whole = memoryview(message)
        for start in range(0, max(1, len(whole)), MAX_FRAME_BYTES):
            part = whole[start : start + MAX_FRAME_BYTES]
            has_next = _HAS_NEXT if start + MAX_FRAME_BYTES < len(whole) else 0
            header = (len(part) | has_next).to_bytes(4, "little")
            tag = _tag(self._send_key, self._num_sent.to_bytes(8, "little"), header, part)
            self._num_sent += 1
            self._connection.sendall(b"".join((header, part, tag)))

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message. Raises EOFError or OSError if the connection has ended, TimeoutError if nothing has come,
        and LinkError for one that is too large or was not sent by the other end."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        found, has_next = self._receive_frame(limit, 0)
        while has_next:
            part, has_next = self._receive_frame(limit, len(found))
            found += part
        return bytes(found)

    def _receive_frame(self, limit: float | None, num_before: int) -> tuple[bytearray, bool]:
        """A part of a message, of which num_before bytes have come, and whether another one follows."""
        header = _receive_exactly(self._connection, 4, limit)
        size, has_next = (field := int.from_bytes(header, "little")) & ~_HAS_NEXT, bool(field & _HAS_NEXT)
        most = MAX_FRAME_BYTES if self._max_bytes is None else self._max_bytes - num_before
        if size > most:
            raise LinkError(f"a frame of {size} bytes, accepted: at most {most}")
        part = _receive_exactly(self._connection, size, limit)
        tag = _receive_exactly(self._connection, _TAG_BYTES, limit)
        number = self._num_received.to_bytes(8, "little")
        if not hmac.compare_digest(tag, _tag(self._receive_key, number, header, part)):
            raise LinkError("a frame that the other end has not sent")
        self._num_received += 1
        return part, has_next

    def has_data(self, timeout_s: float | None) -> bool:
        """Whether something comes, or the end of the connection. Raises OSError or ValueError if it is closed."""
        waiting = select.poll()  # select.select takes no descriptor above 1023
        waiting.register(self._connection, select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))

    def shut_down(self) -> None:
        """End the connection for threads of both ends that wait for it. Any thread."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def accept(connection: socket.socket, secret: bytes) -> tuple[Link, dict[str, Any]]:
    """The engine's side of a greeting: the link, and what the rank says of itself. Raises LinkError or OSError."""
    limit = time.monotonic() + HANDSHAKE_TIMEOUT_S
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING + own)
    theirs = _receive_exactly(connection, _NONCE_BYTES, limit)
    size = int.from_bytes(_receive_exactly(connection, 4, limit), "little")
    if size > _MAX_HELLO_BYTES:
        raise LinkError("a greeting that is too long")
    hello = _receive_exactly(connection, size, limit)
    tag = _receive_exactly(connection, _TAG_BYTES, limit)
    if not hmac.compare_digest(tag, _tag(secret, b"rank", own, theirs, hello)):
        raise LinkError("it does not know the secret")
    connection.sendall(_tag(secret, b"engine", own, theirs, hello))
    to_rank, to_engine = (_tag(secret, name, own, theirs, hello) for name in (b"to rank", b"to engine"))
    said = json.loads(hello)
    if not isinstance(said, dict):
        raise LinkError("a greeting without names")
    return Link(connection, to_rank, to_engine, MAX_REPLY_BYTES), said


def connect(address: tuple[str, int], secret: bytes, said: dict[str, Any]) -> Link:
    """A rank's side of it. Raises LinkError or OSError."""
    hello, own = json.dumps(said).encode(), secrets.token_bytes(_NONCE_BYTES)
    connection = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
    try:
        limit = time.monotonic() + HANDSHAKE_TIMEOUT_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _receive_exactly(connection, len(_GREETING), limit) != _GREETING:
            raise LinkError("no engine of this version")
        theirs = _receive_exactly(connection, _NONCE_BYTES, limit)
        tag = _tag(secret, b"rank", theirs, own, hello)
        connection.sendall(b"".join((own, len(hello).to_bytes(4, "little"), hello, tag)))
        found = _receive_exactly(connection, _TAG_BYTES, limit)
        if not hmac.compare_digest(found, _tag(secret, b"engine", theirs, own, hello)):
            raise LinkError("it does not know the secret")
        to_rank, to_engine = (_tag(secret, name, theirs, own, hello) for name in (b"to rank", b"to engine"))
    except EOFError:
        connection.close()
        raise LinkError("it has ended the greeting: is the secret the same?") from None
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    for option, value in _KEEPALIVE:  # while the engine waits for other ranks, and nothing is sent
        connection.setsockopt(*option, value)
    return Link(connection, to_engine, to_rank, None)


def read_secret(path: str) -> bytes:
    """The secret of a file, without white space around it. Raises ConfigError."""
    accepted = f"a file with {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes that all nodes have, and nobody else"
    try:
        with Path(path).open("rb") as file:
            found = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError("rank_secret_file", path, f"{error.strerror}; accepted: {accepted}") from error
    secret = found.strip()
    if len(secret) < MIN_SECRET_BYTES or len(found) > _MAX_SECRET_BYTES:
        raise ConfigError("rank_secret_file", path, f"accepted: {accepted}")
    return secret


def _tag(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    """Each part has a fixed length, or is the last."""
    return hmac.digest(key, b"".join(parts), "sha256")


def _receive_exactly(connection: socket.socket, size: int, limit: float | None) -> bytearray:
    """limit: of time.monotonic(), or None."""
    found = bytearray()
    while len(found) < size:
        if limit is not None:
            connection.settimeout(max(0.001, limit - time.monotonic()))
        part = connection.recv(min(size - len(found), 1 << 20))
        if limit is not None:
            connection.settimeout(None)
        if not part:
            raise EOFError
        found += part
    return found
