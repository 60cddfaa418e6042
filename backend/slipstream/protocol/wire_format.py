"""Primitives of the frames between the C++ backend and the engine process: numbers, strings, whole frames.

Everything is little endian.  frame = u32 payload length, u8 type, payload.  `string` = u16 length + UTF-8,
`text` = u32 length + bytes.  No I/O happens here; wire.py has the messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from slipstream.core.wire_messages import FRAME_HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameType, ProtocolError

FRAME_HEADER = struct.Struct("<IB")
U16 = struct.Struct("<H")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
F64 = struct.Struct("<d")


def encode_frame(frame_type: int, *parts: bytes) -> bytes:
    """Join parts into one frame.  Raises ValueError above MAX_PAYLOAD_BYTES."""
    num_bytes = sum(map(len, parts))
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"frame of {num_bytes} bytes is longer than {MAX_PAYLOAD_BYTES}")
    return b"".join((FRAME_HEADER.pack(num_bytes, frame_type), *parts))


def pack_string(value: str) -> bytes:
    data = value.encode("utf-8")
    if len(data) > 0xFFFF:
        raise ValueError(f"a str field holds at most 65535 bytes, got {len(data)}")
    return U16.pack(len(data)) + data


def pack_text(value: bytes) -> bytes:
    return U32.pack(len(value)) + value


def pack_dims(shape: Sequence[int]) -> bytes:
    return struct.pack(f"<B{len(shape)}q", len(shape), *shape)


class Reader:
    """A bounds-checked cursor over one payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._payload):
            raise ProtocolError(f"payload of {len(self._payload)} bytes ends inside a field that reaches {end}")
        data = self._payload[self._at : end]
        self._at = end
        return data

    def number(self, layout: struct.Struct) -> int:
        return layout.unpack(self.take(layout.size))[0]

    def byte(self) -> int:
        return self.take(1)[0]

    def real(self) -> float:
        return F64.unpack(self.take(8))[0]

    def string(self) -> str:
        return self._utf8(self.take(self.number(U16)))

    def blob(self) -> bytes:
        return self.take(self.number(U32))

    def text(self) -> str:
        return self._utf8(self.blob())

    def client_string(self) -> str:
        """Text that a client chose: bytes that are not UTF-8 are its fault, and must not look like a protocol error."""
        return self.take(self.number(U16)).decode("utf-8", "surrogateescape")

    def client_text(self) -> str:
        return self.blob().decode("utf-8", "surrogateescape")

    def dims(self) -> tuple[int, ...]:
        rank = self.byte()
        return struct.unpack(f"<{rank}q", self.take(8 * rank))

    def left(self) -> int:
        return len(self._payload) - self._at

    def finish(self) -> None:
        if self.left():
            raise ProtocolError(f"{self.left()} bytes left over at the end of a payload")

    @staticmethod
    def _utf8(data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a text field is not UTF-8: {error}") from error


class FrameBuffer:
    """Cut a byte stream into frames: feed what the socket gave, iterate over what is complete."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameType, bytes]]:
        """Yield (type, payload) of each complete frame.  Raises ProtocolError for an unknown type or length."""
        self._pending += data
        at = 0
        try:
            while len(self._pending) - at >= FRAME_HEADER_BYTES:
                length, raw_type = FRAME_HEADER.unpack_from(self._pending, at)
                frame_type = _check_header(length, raw_type)
                end = at + FRAME_HEADER_BYTES + length
                if end > len(self._pending):
                    break
                payload = bytes(self._pending[at + FRAME_HEADER_BYTES : end])
                at = end
                yield frame_type, payload
        finally:
            del self._pending[:at]


def _check_header(length: int, raw_type: int) -> FrameType:
    if length > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"frame of {length} bytes is longer than {MAX_PAYLOAD_BYTES}")
    try:
        return FrameType(raw_type)
    except ValueError:
        raise ProtocolError(f"unknown frame type {raw_type}") from None
