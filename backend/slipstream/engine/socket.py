"""The engine process's end of the socket to the C++ backend: handshake, frames in, frames out, errors as frames.

One thread reads (`EngineLink.frames`); any thread may send, a frame at a time. Knows frames, not what is in requests.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from slipstream.core.errors import CapacityError, EngineError, RequestError, internal_error
from slipstream.protocol import wire
from slipstream.protocol.responses import error_code

_RECEIVE_BYTES = 1 << 18
_SOCKET_BUFFER_BYTES = 1 << 20  # so that a burst of answers does not wait for the peer's thread


class EngineLink:
    """A connected socket after the handshake. path: a file, or "@name" for an abstract address (Linux).

    Raises OSError from the constructor if no process listens.
    """

    def __init__(self, path: str, token: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._socket.connect("\0" + path[1:] if path.startswith("@") else path)
        self._send_lock = threading.Lock()
        self._frames = self._read_frames()
        self.send(wire.encode_hello(token))

    def send(self, frame: bytes) -> None:
        """Send one whole frame; returns when the kernel has it. Raises OSError when the backend is gone."""
        with self._send_lock:
            self._socket.sendall(frame)

    def frames(self) -> Iterator[tuple[wire.FrameType, bytes]]:
        """Yield every frame of the backend until it closes the connection. Raises wire.ProtocolError."""
        return self._frames

    def receive_config(self) -> wire.Config:
        """Receive the first frame. Raises wire.ProtocolError if it is no CONFIG or the connection ends."""
        for kind, payload in self._frames:
            if kind is not wire.FrameType.CONFIG:
                raise wire.ProtocolError(f"expected CONFIG first, got {kind.name}")
            return wire.decode_config(payload)
        raise wire.ProtocolError("the backend closed the connection before CONFIG")

    def stop_reading(self) -> None:
        """Make `frames` end soon, from another thread; sending still works."""
        self._socket.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Let the backend know that nothing comes any more, once it has read all that was sent. The kernel closes the
        socket of a process late, after it has taken its memory: until then the backend would send requests."""
        with suppress(OSError):  # the backend was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read_frames(self) -> Iterator[tuple[wire.FrameType, bytes]]:
        buffer = wire.FrameBuffer()
        with suppress(ConnectionResetError):  # the backend has closed it before it read all that was sent
            while data := self._socket.recv(_RECEIVE_BYTES):
                yield from buffer.feed(data)


logger = logging.getLogger(__name__)


def error_answer(handle: int, error: Exception) -> bytes:
    """The frame that ends a request with an error. Only errors made for clients keep their text."""
    if not isinstance(error, (RequestError, CapacityError, EngineError)):
        error = internal_error(logger, "a request failed in an unforeseen way", error)
    return wire.encode_responses([wire.error_response(handle, error_code(type(error)), str(error))])


def too_large(handle: int, response: bytes) -> bytes:
    """The error response for a response that exceeds MAX_RESPONSE_BYTES."""
    message = f"response: has {len(response)} bytes, accepted: at most {wire.MAX_RESPONSE_BYTES}; stream it"
    return wire.error_response(handle, wire.ErrorCode.INVALID_ARG, message)


def read_request(payload: bytes, answer: Callable[[bytes], None]) -> wire.Request | None:
    """Decode a REQUEST frame. If it cannot be read, answer it with an error and return None.

    Raises wire.ProtocolError only for a payload without a handle, which cannot be answered.
    """
    try:
        return wire.decode_request(payload)
    except Exception as error:
        failure = internal_error(logger, "a REQUEST frame cannot be read", error)
        answer(error_answer(wire.handle_of(payload), failure))
        return None
