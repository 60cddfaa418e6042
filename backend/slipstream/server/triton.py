"""The gateway's side of Triton's gRPC: one long-lived channel, one bidirectional stream per request.

Event loop thread. A stream per request costs less than many requests on one (24 against 33 us a message, docs/LOG.md),
and ending it is the cancel that Triton passes on to the engine. Knows nothing of OpenAI.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from json import dumps
from types import TracebackType
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream.server.errors import ApiError, from_grpc

UNARY_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_STREAM_METADATA = (("triton_grpc_error", "true"),)  # errors come as gRPC status codes, not as text alone
Answer = TypeVar("Answer")


@dataclass(slots=True)
class Generation:
    """One request to a model with Slipstream's tensors. prompt: text, or token ids. sampling: see docs/contracts.md."""

    model: str
    prompt: str | Sequence[int]
    sampling: dict[str, Any]
    outputs: tuple[str, ...]
    stream: bool = False
    request_id: str = ""

    def to_proto(self) -> service_pb2.ModelInferRequest:
        request = service_pb2.ModelInferRequest(model_name=self.model, id=self.request_id)
        if isinstance(self.prompt, str):
            _add(request, "text_input", "BYTES", 1, _string(self.prompt))
        else:
            data = struct.pack(f"<{len(self.prompt)}i", *self.prompt)
            _add(request, "input_ids", "INT32", len(self.prompt), data)
        sampling = {"exclude_input_in_output": True, **self.sampling}
        _add(request, "sampling_parameters", "BYTES", 1, _string(dumps(sampling)))
        _add(request, "stream", "BOOL", 1, b"\x01" if self.stream else b"\x00")
        for name in self.outputs:
            request.outputs.add(name=name)
        return request


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
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


class GenerateStream:
    """The responses of one request. Leaving the `async with` block early cancels the request in Triton."""

    def __init__(self, call: Any, request: service_pb2.ModelInferRequest) -> None:
        self._call, self._request = call, request
        self._positions: dict[str, int] = {}
        self.is_cancelled = False

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()  # no effect after the end

    async def start(self) -> None:
        try:
            await self._call.write(self._request)
            await self._call.done_writing()
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error.code(), error.details() or "") from None
        except asyncio.InvalidStateError:  # the server ended the stream before it had read the request: read() says why
            return

    async def read(self) -> Response | None:
        """The next response, None after the last. Raises ApiError, or CancelledError after cancel()."""
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise from_grpc(error.code(), error.details() or "") from None
            if message is grpc.aio.EOF:
                await self._check_end()
                return None
            if message.error_message:
                raise from_grpc(grpc.StatusCode.INTERNAL, message.error_message)
            response = message.infer_response
            if response.raw_output_contents:  # else the empty last one
                if not self._positions:
                    self._positions = {output.name: index for index, output in enumerate(response.outputs)}
                return Response(self._positions, response.raw_output_contents)

    async def _check_end(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise from_grpc(code, await self._call.details() or "")

    def cancel(self) -> None:
        """End the request in Triton; a pending read() raises CancelledError."""
        self.is_cancelled = True
        self._call.cancel()


@dataclass
class TritonLink:
    """One per worker process; make it on the event loop that uses it."""

    url: str
    _channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    def generate(self, generation: Generation) -> GenerateStream:
        return GenerateStream(self._stub.ModelStreamInfer(metadata=_STREAM_METADATA), generation.to_proto())

    async def is_ready(self) -> bool:
        try:
            return (await self._unary(self._stub.ServerReady, service_pb2.ServerReadyRequest())).ready
        except ApiError:
            return False

    async def index(self) -> list[service_pb2.RepositoryIndexResponse.ModelIndex]:
        """All models that the server knows, whatever their state."""
        return list((await self._unary(self._stub.RepositoryIndex, service_pb2.RepositoryIndexRequest())).models)

    async def config(self, model: str) -> Any:
        return (await self._unary(self._stub.ModelConfig, service_pb2.ModelConfigRequest(name=model))).config

    async def infer(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferResponse:
        return await self._unary(self._stub.ModelInfer, request, timeout_s=60.0)

    async def _unary(
        self, call: Callable[..., Awaitable[Any]], request: Any, timeout_s: float = UNARY_TIMEOUT_S
    ) -> Any:
        try:
            return await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error.code(), error.details() or "") from None
