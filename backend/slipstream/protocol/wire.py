"""Frames between the C++ backend and the engine process: one encoder and one decoder for each, nothing else.

Used by the engine process (both of its socket threads) and by the tests' stand-in engine; no I/O happens here.
Everything is little endian.  frame = u32 payload length, u8 type, payload.  `str` = u16 length + UTF-8,
`text` = u32 length + bytes.  backend/triton/wire.h is the other end; tests/golden holds the bytes both must produce.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Sequence

from slipstream.core.wire_messages import (
    FRAME_HEADER_BYTES,
    FRAME_TARGET_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    MAX_RESPONSE_BYTES,
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Config,
    DataType,
    ErrorCode,
    FrameType,
    MetricKind,
    MetricSpec,
    OutputSpec,
    ParameterValue,
    ProtocolError,
    Request,
    Response,
    ResponseFlag,
    Tensor,
)

__all__ = [  # the records, re-exported: users import this module alone
    "FRAME_HEADER_BYTES",
    "FRAME_TARGET_BYTES",
    "MAGIC",
    "MAX_PAYLOAD_BYTES",
    "MAX_RESPONSE_BYTES",
    "PROTOCOL_VERSION",
    "TOKEN_BYTES",
    "Config",
    "DataType",
    "ErrorCode",
    "FrameType",
    "MetricKind",
    "MetricSpec",
    "OutputSpec",
    "ParameterValue",
    "ProtocolError",
    "Request",
    "Response",
    "ResponseFlag",
    "Tensor",
]

# ---------------------------------------------------------------- primitives

_FRAME_HEADER = struct.Struct("<IB")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")


def encode_frame(frame_type: int, *parts: bytes) -> bytes:
    """Join parts into one frame.  Raises ValueError above MAX_PAYLOAD_BYTES."""
    payload = b"".join(parts)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"frame of {len(payload)} bytes is longer than {MAX_PAYLOAD_BYTES}")
    return _FRAME_HEADER.pack(len(payload), frame_type) + payload


def _str(value: str) -> bytes:
    data = value.encode("utf-8")
    if len(data) > 0xFFFF:
        raise ValueError(f"a str field holds at most 65535 bytes, got {len(data)}")
    return _U16.pack(len(data)) + data


def _text(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def _dims(shape: Sequence[int]) -> bytes:
    return struct.pack(f"<B{len(shape)}q", len(shape), *shape)


class _Reader:
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
        return _F64.unpack(self.take(8))[0]

    def string(self) -> str:
        return self._utf8(self.take(self.number(_U16)))

    def blob(self) -> bytes:
        return self.take(self.number(_U32))

    def text(self) -> str:
        return self._utf8(self.blob())

    def client_string(self) -> str:
        """Text that a client chose: bytes that are not UTF-8 are its fault, and must not look like a protocol error."""
        return self.take(self.number(_U16)).decode("utf-8", "surrogateescape")

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
                length, raw_type = _FRAME_HEADER.unpack_from(self._pending, at)
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


# ---------------------------------------------------------------- backend -> engine


def encode_config(config: Config) -> bytes:
    return encode_frame(
        FrameType.CONFIG,
        _str(config.model_name),
        _U64.pack(config.model_version),
        _text(config.model_dir.encode("utf-8")),
        _text(config.config_json.encode("utf-8")),
    )


def decode_config(payload: bytes) -> Config:
    reader = _Reader(payload)
    config = Config(reader.string(), reader.number(_U64), reader.text(), reader.text())
    reader.finish()
    return config


def encode_request(request: Request) -> bytes:
    parts = [struct.pack("<QQQ", request.handle, request.arrival_ns, request.timeout_us), _str(request.request_id)]
    parts.append(_U16.pack(len(request.requested_outputs)))
    parts += [_str(name) for name in request.requested_outputs]
    parts.append(_U16.pack(len(request.inputs)))
    for tensor in request.inputs:
        parts += [_str(tensor.name), bytes([tensor.dtype]), _dims(tensor.shape), _text(tensor.data)]
    parts.append(_U16.pack(len(request.parameters)))
    for name, value in request.parameters.items():
        parts += [_str(name), _encode_parameter(value)]
    return encode_frame(FrameType.REQUEST, *parts)


def decode_request(payload: bytes) -> Request:
    """Raises ProtocolError, also for a parameter of unknown kind."""
    reader = _Reader(payload)
    handle, arrival_ns, timeout_us = (reader.number(_U64) for _ in range(3))
    request_id = reader.client_string()
    requested_outputs = tuple(reader.string() for _ in range(reader.number(_U16)))
    inputs = tuple(
        Tensor(reader.string(), reader.byte(), reader.dims(), reader.blob()) for _ in range(reader.number(_U16))
    )
    parameters = {}
    for _ in range(reader.number(_U16)):
        name = reader.client_string()
        parameters[name] = _decode_parameter(reader)
    reader.finish()
    return Request(handle, arrival_ns, timeout_us, request_id, requested_outputs, inputs, parameters)


def handle_of(payload: bytes) -> int:
    """The handle of a REQUEST payload, whatever follows it. Raises ProtocolError when there is none."""
    return _Reader(payload).number(_U64)


def _encode_parameter(value: ParameterValue) -> bytes:
    if isinstance(value, str):
        return b"\x00" + _text(value.encode("utf-8"))
    if isinstance(value, bool):
        return b"\x02" + bytes([value])
    if isinstance(value, int):
        return b"\x01" + _I64.pack(value)
    return b"\x03" + _F64.pack(value)


def _decode_parameter(reader: _Reader) -> ParameterValue:
    kind = reader.byte()
    if kind == 0:
        return reader.client_text()
    if kind == 1:
        return reader.number(_I64)
    if kind == 2:
        return bool(reader.byte())
    if kind == 3:
        return reader.real()
    raise ProtocolError(f"unknown parameter kind {kind}")


def encode_cancel(handle: int) -> bytes:
    return encode_frame(FrameType.CANCEL, _U64.pack(handle))


def decode_cancel(payload: bytes) -> int:
    reader = _Reader(payload)
    handle = reader.number(_U64)
    reader.finish()
    return handle


def encode_drain(deadline_ms: int) -> bytes:
    return encode_frame(FrameType.DRAIN, _U32.pack(deadline_ms))


def decode_drain(payload: bytes) -> int:
    reader = _Reader(payload)
    deadline_ms = reader.number(_U32)
    reader.finish()
    return deadline_ms


# ---------------------------------------------------------------- engine -> backend


def encode_hello(token: bytes) -> bytes:
    """token: the 16 bytes whose hex form was given on the command line."""
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"token must be {TOKEN_BYTES} bytes, got {len(token)}")
    return encode_frame(FrameType.HELLO, MAGIC, _U16.pack(PROTOCOL_VERSION), token)


def encode_ready(outputs: Sequence[OutputSpec], metrics: Sequence[MetricSpec]) -> bytes:
    parts = [_U16.pack(len(outputs))]
    parts += [_str(output.name) + bytes([output.dtype]) for output in outputs]
    parts.append(_U16.pack(len(metrics)))
    for metric in metrics:
        parts += [_str(metric.family), bytes([metric.kind]), _str(metric.help), _U16.pack(len(metric.labels))]
        parts += [_str(name) + _str(value) for name, value in metric.labels]
        parts.append(struct.pack(f"<H{len(metric.bounds)}d", len(metric.bounds), *metric.bounds))
    return encode_frame(FrameType.READY, *parts)


def encode_load_failed(message: str) -> bytes:
    return encode_frame(FrameType.LOAD_FAILED, _text(message.encode("utf-8")))


def encode_metrics(samples: Iterable[tuple[int, Sequence[float]]]) -> bytes:
    """samples: (index into READY's list, values): increments of a counter, a gauge's last value, observations."""
    parts = [struct.pack(f"<HI{len(values)}d", index, len(values), *values) for index, values in samples]
    return encode_frame(FrameType.METRICS, _U16.pack(len(parts)), *parts)


def encode_drained() -> bytes:
    return encode_frame(FrameType.DRAINED)


_ONE_BYTES_OUTPUT = struct.Struct("<QBBBBqII").pack
_OUTPUT_RANK_1 = struct.Struct("<BBqI").pack
_RESPONSE_HEAD = struct.Struct("<QB").pack


def bytes_response(handle: int, flags: int, output: int, value: bytes) -> bytes:
    """One response with one BYTES output of shape [1]: the hot path, about half a microsecond."""
    num_bytes = len(value)
    return _ONE_BYTES_OUTPUT(handle, flags, 1, output, 1, 1, num_bytes + 4, num_bytes) + value


def tensor_response(handle: int, flags: int, outputs: Sequence[tuple[int, Sequence[int], bytes]]) -> bytes:
    """One response with any outputs: (index into READY's list, shape, Triton's serialisation) each."""
    parts = [_RESPONSE_HEAD(handle, flags), bytes([len(outputs)])]
    for index, shape, data in outputs:
        if len(shape) == 1:
            parts.append(_OUTPUT_RANK_1(index, 1, shape[0], len(data)))
        else:
            parts.append(bytes([index]) + _dims(shape) + _U32.pack(len(data)))
        parts.append(data)
    return b"".join(parts)


def error_response(handle: int, code: int, message: str) -> bytes:
    """The last response of a request that failed."""
    return (
        _RESPONSE_HEAD(handle, ResponseFlag.ERROR | ResponseFlag.FINAL)
        + bytes([code])
        + _text(message.encode("utf-8", "backslashreplace"))
    )


def final_response(handle: int) -> bytes:
    """End a request whose content has all been sent (or was cancelled)."""
    return _RESPONSE_HEAD(handle, ResponseFlag.EMPTY | ResponseFlag.FINAL)


def encode_responses(responses: Sequence[bytes]) -> bytes:
    """One frame from what the four functions above return."""
    return encode_frame(FrameType.RESPONSES, _U32.pack(len(responses)), *responses)


def decode_responses(payload: bytes) -> list[Response]:
    """The backend's side of encode_responses; here for tests and tools."""
    reader = _Reader(payload)
    responses = [_decode_response(reader) for _ in range(reader.number(_U32))]
    reader.finish()
    return responses


def _decode_response(reader: _Reader) -> Response:
    handle, flags = reader.number(_U64), reader.byte()
    if flags & ResponseFlag.ERROR:
        return Response(handle, flags, reader.byte(), reader.text())
    if flags & ResponseFlag.EMPTY:
        return Response(handle, flags)
    outputs = tuple((reader.byte(), reader.dims(), reader.blob()) for _ in range(reader.byte()))
    return Response(handle, flags, outputs=outputs)


def bytes_tensor(values: Iterable[bytes]) -> bytes:
    """Triton's serialisation of a BYTES tensor."""
    return b"".join(_U32.pack(len(value)) + value for value in values)


def bytes_elements(data: bytes, max_elements: int = sys.maxsize) -> list[bytes]:
    """The elements of a serialised BYTES tensor, the first max_elements of them.

    Raises ProtocolError when the lengths do not add up.
    """
    reader = _Reader(data)
    elements: list[bytes] = []
    while reader.left() and len(elements) < max_elements:
        elements.append(reader.blob())
    return elements
