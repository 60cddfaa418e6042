"""Requests and responses of a model with Slipstream's tensors, as protobuf.

Needs only tritonclient of the gateway's packages, because the terminal's verbs (`chat`, `bench`) use it too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any

from tritonclient.grpc import service_pb2

from slipstream.core.trace_context import TRACEPARENT


@dataclass(slots=True)
class Generation:
    """One request to a model with Slipstream's tensors. prompt: text, or token ids. sampling: see docs/contracts.md."""

    model: str
    prompt: str | Sequence[int]
    sampling: dict[str, Any]
    outputs: tuple[str, ...]
    stream: bool = False
    request_id: str = ""
    traceparent: str = ""

    def settings(self) -> bytes:
        """`sampling` as the model's tensor has it."""
        return dumps({"exclude_input_in_output": True, **self.sampling}).encode()

    def to_proto(self, settings: bytes | None = None) -> service_pb2.ModelInferRequest:
        """settings: as settings() has made them of an equal `sampling`. Raises UnicodeEncodeError for half a
        surrogate in the prompt."""
        request = service_pb2.ModelInferRequest(model_name=self.model, id=self.request_id)
        if isinstance(self.prompt, str):
            _add(request, "text_input", "BYTES", 1, _string(self.prompt.encode("utf-8")))
        else:
            data = struct.pack(f"<{len(self.prompt)}i", *self.prompt)
            _add(request, "input_ids", "INT32", len(self.prompt), data)
        _add(request, "sampling_parameters", "BYTES", 1, _string(self.settings() if settings is None else settings))
        _add(request, "stream", "BOOL", 1, b"\x01" if self.stream else b"\x00")
        for name in self.outputs:
            request.outputs.add(name=name)
        if self.traceparent:
            request.parameters[TRACEPARENT].string_param = self.traceparent
        return request


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, size: int, data: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[size])
    request.raw_input_contents.append(data)


@dataclass(slots=True)
class Response:
    """One response's tensors as bytes, by output name (`positions` is shared by all responses of a stream)."""

    positions: dict[str, int]
    data: Sequence[bytes]

    def text(self, name: str) -> str:
        """The first (mostly the only) string of a BYTES output."""
        data = self.data[self.positions[name]]
        return data[4 : 4 + int.from_bytes(data[:4], "little")].decode("utf-8", "replace")

    def texts(self, name: str) -> list[str]:
        data, found, at = self.data[self.positions[name]], [], 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            found.append(data[at + 4 : at + 4 + size].decode("utf-8", "replace"))
            at += 4 + size
        return found

    def integer(self, name: str) -> int:
        """The first number of an INT32 or UINT32 output."""
        return int.from_bytes(self.data[self.positions[name]][:4], "little")

    def integers(self, name: str) -> list[int]:
        data = self.data[self.positions[name]]
        return list(struct.unpack(f"<{len(data) // 4}i", data))
