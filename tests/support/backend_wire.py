"""The C++ backend's half of the wire protocol in Python, for tests that stand in for it.

Encodes requests and reads replies.  The engine's half is slipstream.protocol.wire; tests/golden holds the bytes that
both this and backend/triton/wire.h must produce.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from slipstream.core.wire_messages import FRAME_HEADER_BYTES, Config, FrameType, ParameterValue, Request, ResponseFlag
from slipstream.protocol.wire_format import (
    F64,
    I64,
    U16,
    U32,
    U64,
    Reader,
    encode_frame,
    pack_dims,
    pack_string,
    pack_text,
)


@dataclass(frozen=True)
class Response:
    """A decoded entry of RESPONSES; each output is (index into READY's list, shape, data)."""

    handle: int
    flags: int
    error_code: int = 0
    error_message: str = ""
    outputs: tuple[tuple[int, tuple[int, ...], bytes], ...] = ()


def payload_of(frame: bytes) -> bytes:
    return frame[FRAME_HEADER_BYTES:]


def encode_config(config: Config) -> bytes:
    return encode_frame(
        FrameType.CONFIG,
        pack_string(config.model_name),
        U64.pack(config.model_version),
        pack_text(config.model_dir.encode("utf-8")),
        pack_text(config.config_json.encode("utf-8")),
    )


def encode_request(request: Request) -> bytes:
    parts = [
        struct.pack("<QQQ", request.handle, request.arrival_ns, request.timeout_us),
        pack_string(request.request_id),
    ]
    parts.append(U16.pack(len(request.requested_outputs)))
    parts += [pack_string(name) for name in request.requested_outputs]
    parts.append(U16.pack(len(request.inputs)))
    for tensor in request.inputs:
        parts += [pack_string(tensor.name), bytes([tensor.dtype]), pack_dims(tensor.shape), pack_text(tensor.data)]
    parts.append(U16.pack(len(request.parameters)))
    for name, value in request.parameters.items():
        parts += [pack_string(name), _encode_parameter(value)]
    return encode_frame(FrameType.REQUEST, *parts)


def _encode_parameter(value: ParameterValue) -> bytes:
    if isinstance(value, str):
        return b"\x00" + pack_text(value.encode("utf-8"))
    if isinstance(value, bool):
        return b"\x02" + bytes([value])
    if isinstance(value, int):
        return b"\x01" + I64.pack(value)
    return b"\x03" + F64.pack(value)


def encode_cancel(handle: int) -> bytes:
    return encode_frame(FrameType.CANCEL, U64.pack(handle))


def encode_drain(deadline_ms: int) -> bytes:
    return encode_frame(FrameType.DRAIN, U32.pack(deadline_ms))


def decode_responses(payload: bytes) -> list[Response]:
    """The responses in the payload of a RESPONSES frame."""
    reader = Reader(payload)
    responses = [_decode_response(reader) for _ in range(reader.number(U32))]
    reader.finish()
    return responses


def _decode_response(reader: Reader) -> Response:
    handle, flags = reader.number(U64), reader.byte()
    if flags & ResponseFlag.ERROR:
        return Response(handle, flags, reader.byte(), reader.text())
    if flags & ResponseFlag.EMPTY:
        return Response(handle, flags)
    outputs = tuple((reader.byte(), reader.dims(), reader.blob()) for _ in range(reader.byte()))
    return Response(handle, flags, outputs=outputs)
