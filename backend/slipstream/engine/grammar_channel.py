"""Messages between the engine and its grammar processes: length-prefixed pickled tuples over a unix socket.

Both ends are ours and share a parent, so pickle is safe here. A channel belongs to one thread, except `send` of a
blocking channel, which locks.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
MAX_UNSENT_BYTES = 256 << 20  # a peer with more unread bytes counts as dead


def readable(descriptors: Iterable[int], timeout: float | None) -> set[int]:
    """The readable descriptors; waits at most `timeout` seconds for the first one, None: without limit.

    Uses poll(), because select() supports no descriptor above 1023.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return {found for found, _ in waiting.poll(None if timeout is None else max(0.0, timeout * 1e3))}


class _Unsent(NamedTuple):
    """The unsent rest of a frame. fds: duplicated descriptors to send with its first byte."""

    data: memoryview
    fds: list[int]


class Channel:
    """is_blocking: `send` waits for the peer and sends no descriptors; `receive` never waits. Raises OSError if the
    peer is gone."""

    def __init__(self, sock: socket.socket, is_blocking: bool) -> None:
        self.socket = sock
        self.fds: list[int] = []  # received with messages, in order
        self._unsent: deque[_Unsent] = deque()
        self._num_unsent_bytes = 0
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
            self._unsent.append(_Unsent(memoryview(frame), _copy(fds)))
            self._num_unsent_bytes += len(frame)
            self._flush()
            if self._num_unsent_bytes > MAX_UNSENT_BYTES:
                raise BrokenPipeError("the grammar process reads nothing")

    def receive(self) -> list[tuple[Any, ...]]:
        """The received messages, without waiting. Raises ConnectionError if the peer has closed."""
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
        while self._unsent:
            _close(self._unsent.popleft().fds)

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
        """Send as much as the socket accepts. Descriptors are queued with their frame while the peer does not read."""
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                num_sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            except BlockingIOError:
                return
            _close(fds)
            self._num_unsent_bytes -= num_sent
            if num_sent < len(data):
                self._unsent[0] = _Unsent(data[num_sent:], [])
            else:
                self._unsent.popleft()


def _copy(fds: Iterable[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        _close(copies)
        raise
    return copies


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
