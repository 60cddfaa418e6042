"""The gateway's side of Triton's gRPC: one long-lived channel, one bidirectional stream per request.

Event loop thread. A stream per request costs less than many requests on one (24 against 33 us per message), and ending
it cancels the request in the engine. Knows nothing of OpenAI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream.core.trace_context import TRACEPARENT
from slipstream.server.errors import ApiError, from_grpc, from_text
from slipstream.server.generation import Generation, Response

UNARY_TIMEOUT_S = 10.0
GRACE_S = 0.25
MAX_REPEATED_SETTINGS_BYTES = 16 << 20  # of all prompts of a request; 256 of 64 KiB take 30 ms
END_TIMEOUT_S = 5.0  # max wait for the end of a stream after its error; the client waits for it
Result = TypeVar("Result")
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class GenerateStream:
    """The responses of one request. Leaving the `async with` block early cancels the request in Triton."""

    def __init__(self, call: Any, request: service_pb2.ModelInferRequest) -> None:
        self._call, self._request = call, request
        self._positions: dict[str, int] = {}
        self._sending: asyncio.Task[None] | None = None
        self.is_cancelled = False

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()  # no effect after the end

    async def start(self) -> None:
        """Send the request. Raises ApiError, or CancelledError after cancel().

        A task of its own, because gRPC never ends a write() of a call that was cancelled before it had begun.
        """
        self._sending = asyncio.create_task(self._send())
        await self._sending

    async def _send(self) -> None:
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
                await self._drain(message)
                raise from_text(message.error_message)
            response = message.infer_response
            if response.raw_output_contents:  # else the empty last one
                if not self._positions:
                    self._positions = {output.name: index for index, output in enumerate(response.outputs)}
                return Response(self._positions, response.raw_output_contents)

    async def _drain(self, message: service_pb2.ModelStreamInferResponse) -> None:
        """Wait for the end of a request whose last response was an error, before its stream is cancelled.

        If a request is cancelled while it ends, server 2.51 never unloads its model.
        """
        parameters = message.infer_response.parameters
        if not parameters or parameters["triton_final_response"].bool_param:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._read_to_end(), END_TIMEOUT_S)

    async def _read_to_end(self) -> None:
        while await self._call.read() is not grpc.aio.EOF:
            pass

    async def _check_end(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise from_grpc(code, await self._call.details() or "")

    def cancel(self) -> None:
        """End the request in Triton; a pending start() or read() raises CancelledError."""
        self.is_cancelled = True
        self._call.cancel()
        if self._sending is not None:
            self._sending.cancel()  # no effect after its end


async def together(parts: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, in order. After the first ApiError the others get GRACE_S to end by themselves.

    Often they end with the same error, and must not be cancelled in that moment (see _drain).
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    except ApiError:
        await asyncio.wait(tasks, timeout=GRACE_S)
        raise


def _written(generations: Sequence[Generation]) -> list[service_pb2.ModelInferRequest]:
    """The settings of a request are written once, and sent with each of its prompts."""
    first = generations[0]
    settings, count = first.settings(), len(generations)
    if count > 1 and count * len(settings) > MAX_REPEATED_SETTINGS_BYTES:
        message = f"prompt: has {count} prompts, each of which is sent with settings of {len(settings)} bytes"
        accepted = f"accepted: at most {MAX_REPEATED_SETTINGS_BYTES} bytes in all; send fewer prompts at a time"
        raise ApiError(400, f"{message}, {accepted}", param="prompt")
    return [one.to_proto(settings if one.sampling == first.sampling else None) for one in generations]


@dataclass
class TritonLink:
    """One per worker process; construct it on the event loop that uses it."""

    url: str
    _channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    def generate(self, generations: Sequence[Generation]) -> list[GenerateStream]:
        """A stream for each, opened only if all are valid. Raises ApiError for settings that would be sent too often,
        UnicodeEncodeError for a lone surrogate."""
        requests = _written(generations)
        calls = [
            self._stub.ModelStreamInfer(metadata=((TRACEPARENT, one.traceparent),) if one.traceparent else None)
            for one in generations  # Triton takes a trace from metadata, the engine from the request
        ]
        return [GenerateStream(call, request) for call, request in zip(calls, requests)]

    def open(self, request: service_pb2.ModelInferRequest) -> GenerateStream:
        """The stream of a request that is no generation."""
        return GenerateStream(self._stub.ModelStreamInfer(), request)

    async def is_live(self) -> bool:
        try:
            return (await self._unary(self._stub.ServerLive, service_pb2.ServerLiveRequest())).live
        except ApiError:
            return False

    async def index(self) -> list[service_pb2.RepositoryIndexResponse.ModelIndex]:
        """All models that the server knows, in any state."""
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
