"""Frames between the C++ backend and the engine process, the engine's half: reads what the backend sends, and replies.

Used by the engine process (both of its socket threads) and by the tests' stand-in engine; no I/O happens here.
backend/triton/wire.h is the other half, tests/support/backend_wire.py the same in Python for tests; tests/golden holds
the bytes that all must produce.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence

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
    ResponseFlag,
    Tensor,
)
from slipstream.protocol.wire_format import (
    I64,
    U16,
    U32,
    U64,
    FrameBuffer,
    Reader,
    encode_frame,
    pack_dims,
    pack_string,
    pack_text,
)

__all__ = [  # the records and frames, re-exported: users import this module alone
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
    "FrameBuffer",
    "FrameType",
    "MetricKind",
    "MetricSpec",
    "OutputSpec",
    "ParameterValue",
    "ProtocolError",
    "Request",
    "ResponseFlag",
    "Tensor",
    "encode_frame",
]

# ---------------------------------------------------------------- backend -> engine


def decode_config(payload: bytes) -> Config:
    reader = Reader(payload)
    config = Config(reader.string(), reader.number(U64), reader.text(), reader.text())
    reader.finish()
    return config


def decode_request(payload: bytes) -> Request:
    """Raises ProtocolError, also for a parameter of unknown kind."""
    reader = Reader(payload)
    handle, arrival_ns, timeout_us = (reader.number(U64) for _ in range(3))
    request_id = reader.client_string()
    requested_outputs = tuple(reader.string() for _ in range(reader.number(U16)))
    inputs = tuple(
        Tensor(reader.string(), reader.byte(), reader.dims(), reader.blob()) for _ in range(reader.number(U16))
    )
    parameters = {}
    for _ in range(reader.number(U16)):
        name = reader.client_string()
        parameters[name] = _decode_parameter(reader)
    reader.finish()
    return Request(handle, arrival_ns, timeout_us, request_id, requested_outputs, inputs, parameters)


def handle_of(payload: bytes) -> int:
    """The handle of a REQUEST payload, whatever follows it. Raises ProtocolError when there is none."""
    return Reader(payload).number(U64)


def _decode_parameter(reader: Reader) -> ParameterValue:
    kind = reader.byte()
    if kind == 0:
        return reader.client_text()
    if kind == 1:
        return reader.number(I64)
    if kind == 2:
        return bool(reader.byte())
    if kind == 3:
        return reader.real()
    raise ProtocolError(f"unknown parameter kind {kind}")


def decode_cancel(payload: bytes) -> int:
    reader = Reader(payload)
    handle = reader.number(U64)
    reader.finish()
    return handle


def decode_drain(payload: bytes) -> int:
    reader = Reader(payload)
    deadline_ms = reader.number(U32)
    reader.finish()
    return deadline_ms


# ---------------------------------------------------------------- engine -> backend


def encode_hello(token: bytes) -> bytes:
    """token: the 16 bytes whose hex form was given on the command line."""
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"token must be {TOKEN_BYTES} bytes, got {len(token)}")
    return encode_frame(FrameType.HELLO, MAGIC, U16.pack(PROTOCOL_VERSION), token)


def encode_ready(outputs: Sequence[OutputSpec], metrics: Sequence[MetricSpec]) -> bytes:
    parts = [U16.pack(len(outputs))]
    parts += [pack_string(output.name) + bytes([output.dtype]) for output in outputs]
    parts.append(U16.pack(len(metrics)))
    for metric in metrics:
        parts += [
            pack_string(metric.family),
            bytes([metric.kind]),
            pack_string(metric.help),
            U16.pack(len(metric.labels)),
        ]
        parts += [pack_string(name) + pack_string(value) for name, value in metric.labels]
        parts.append(struct.pack(f"<H{len(metric.bounds)}d", len(metric.bounds), *metric.bounds))
    return encode_frame(FrameType.READY, *parts)


def encode_load_failed(message: str) -> bytes:
    return encode_frame(FrameType.LOAD_FAILED, pack_text(message.encode("utf-8")))


def encode_metrics(samples: Iterable[tuple[int, Sequence[float]]]) -> bytes:
    """samples: (index into READY's list, values): increments of a counter, a gauge's last value, observations."""
    parts = [struct.pack(f"<HI{len(values)}d", index, len(values), *values) for index, values in samples]
    return encode_frame(FrameType.METRICS, U16.pack(len(parts)), *parts)


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
            parts.append(bytes([index]) + pack_dims(shape) + U32.pack(len(data)))
        parts.append(data)
    return b"".join(parts)


def error_response(handle: int, code: int, message: str) -> bytes:
    """The last response of a request that failed."""
    return (
        _RESPONSE_HEAD(handle, ResponseFlag.ERROR | ResponseFlag.FINAL)
        + bytes([code])
        + pack_text(message.encode("utf-8", "backslashreplace"))
    )


def final_response(handle: int) -> bytes:
    """End a request whose content has all been sent (or was cancelled)."""
    return _RESPONSE_HEAD(handle, ResponseFlag.EMPTY | ResponseFlag.FINAL)


def encode_responses(responses: Sequence[bytes]) -> bytes:
    """One frame from what the four functions above return."""
    return encode_frame(FrameType.RESPONSES, U32.pack(len(responses)), *responses)


def bytes_tensor(values: Iterable[bytes]) -> bytes:
    """Triton's serialisation of a BYTES tensor."""
    return b"".join(part for value in values for part in (U32.pack(len(value)), value))


def bytes_length(num_bytes: int) -> bytes:
    """What stands before an element of such a tensor."""
    return U32.pack(num_bytes)


def bytes_elements(data: bytes, max_elements: int = sys.maxsize) -> list[bytes]:
    """The elements of a serialised BYTES tensor, the first max_elements of them.

    Raises ProtocolError when the lengths do not add up.
    """
    reader = Reader(data)
    elements: list[bytes] = []
    while reader.left() and len(elements) < max_elements:
        elements.append(reader.blob())
    return elements
