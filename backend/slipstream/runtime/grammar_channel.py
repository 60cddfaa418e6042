"""Messages between the engine and its grammar processes: pickled tuples, each after its length, over a unix socket.

Both ends are ours and share a parent, so pickle is safe here. A channel belongs to one thread, but for `send` of a
blocking one, which locks.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_FDS_TIMEOUT_S = 2.0
MAX_UNSENT_BYTES = 256 << 20  # a peer that reads nothing while so much piles up is taken for dead


def readable(descriptors: Iterable[int], timeout: float | None) -> set[int]:
    """Those with something to read, waiting `timeout` seconds at most for the first; None waits for ever.

    By poll(), because select() takes no descriptor above 1023, and a process may have more files open.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return {found for found, _ in waiting.poll(None if timeout is None else max(0.0, timeout * 1e3))}


class Channel:
    """is_blocking: whether `send` waits for the peer; `receive` never does. Raises OSError when the peer is gone."""

    def __init__(self, sock: socket.socket, is_blocking: bool) -> None:
        self.socket = sock
        self.fds: list[int] = []  # that came with messages, in order
        self._unsent = bytearray()
        self._received = bytearray()
        self._lock = threading.Lock()
        sock.setblocking(is_blocking)
        self._is_blocking = is_blocking

    def send(self, message: tuple[Any, ...], fds: tuple[int, ...] = ()) -> None:
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        frame = _LENGTH.pack(len(payload)) + payload
        with self._lock:
            if self._is_blocking:
                self.socket.sendall(frame)
                return
            if fds:
                self._send_with_fds(frame, fds)
                return
            self._unsent += frame
            self._flush()
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise BrokenPipeError("the grammar process reads nothing")

    def receive(self) -> list[tuple[Any, ...]]:
        """What has come, without waiting. Raises ConnectionError when the peer has closed."""
        with self._lock:
            self._flush()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, _READ_BYTES, 4, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            self.fds += fds
            if not data:
                raise ConnectionResetError("the grammar process is gone")
            self._received += data
            if len(data) < _READ_BYTES:
                break
        return self._take()

    def close(self) -> None:
        self.socket.close()

    def _take(self) -> list[tuple[Any, ...]]:
        messages, start, buffer = [], 0, self._received
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(pickle.loads(memoryview(buffer)[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return messages

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def _send_with_fds(self, frame: bytes, fds: tuple[int, ...]) -> None:
        """The descriptors travel with the frame, which must not wait behind others: this waits, for a peer that does
        nothing but read."""
        self.socket.settimeout(_FDS_TIMEOUT_S)
        try:
            self.socket.sendall(self._unsent)
            self._unsent.clear()
            if socket.send_fds(self.socket, [frame], list(fds)) != len(frame):
                raise BrokenPipeError("the grammar process reads nothing")
        finally:
            self.socket.setblocking(False)
