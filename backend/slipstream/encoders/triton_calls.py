"""Calls models of the same server over gRPC from a model of the Python backend.

Event loop thread; one channel, a stream per generating request. BLS is not used because server 2.51's stub sometimes
loses a decoupled answer or crashes (docs/measurements), and cannot cancel requests before server 25.04. Ending a gRPC
stream cancels the LLM's request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from slipstream.core.answer_faults import AnswerError, fault_of
from slipstream.core.errors import CapacityError, EngineError, RequestError
from slipstream.encoders.timed_calls import happens

Tensors = dict[str, np.ndarray]
_CONNECT_S = 2.0
_LIVE_S = 2.0
_DRAIN_S = 4.0  # max time to drain a failed stream, whose request is already answered
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 200),  # several tries within _CONNECT_S
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment is not for calls of the own machine
]
_FAULTS = {grpc.StatusCode.INVALID_ARGUMENT: RequestError, grpc.StatusCode.UNAVAILABLE: CapacityError}


@dataclass(frozen=True)
class Call:
    """A request to a model. parameters: of the request; timeout_us: Triton's `timeout`, 0 for none."""

    model: str
    inputs: Mapping[str, np.ndarray]
    outputs: Sequence[str]
    request_id: str = ""
    parameters: Mapping[str, Any] | None = None
    timeout_us: int = 0

    def to_proto(self) -> Any:
        request = service_pb2.ModelInferRequest(model_name=self.model, id=self.request_id)
        for name, values in self.inputs.items():
            request.inputs.add(name=name, datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
            request.raw_input_contents.append(_to_raw(values))
        for name in self.outputs:
            request.outputs.add(name=name)
        for name, value in (self.parameters or {}).items():
            _set(request.parameters[name], value)
        if self.timeout_us:
            request.parameters["timeout"].int64_param = self.timeout_us
        return request


class TritonCalls:
    """Construct it on the event loop that uses it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel = grpc.aio.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._draining: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """Raises AnswerError naming the parameter if no server answers; does not retry if one has answered before."""
        if self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return
        if not await happens(self._channel.channel_ready(), _CONNECT_S):
            told = f"triton_url: nothing answers gRPC at {self._url}; accepted: host:port of this server's gRPC"
            raise AnswerError(told, CapacityError)

    async def check_live(self) -> None:
        """Raises AnswerError if the server shuts down (its models have no versions); not if it is slow."""
        try:
            answer = await self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=_LIVE_S)
            is_live, told = answer.live, "it is not live"
        except grpc.aio.AioRpcError as error:
            is_live, told = error.code() is not grpc.StatusCode.UNAVAILABLE, error.details() or error.code().name
        if not is_live:
            raise AnswerError(f"the server is shutting down: {told}", CapacityError)

    async def close(self) -> None:
        if self._draining:
            await asyncio.wait(self._draining)
        await self._channel.close()

    async def infer(self, call: Call, timeout_s: float) -> Tensors:
        """The answer of a model that has one.  Raises AnswerError."""
        try:
            return _outputs(await self._stub.ModelInfer(call.to_proto(), timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise _failure(error.code(), error.details()) from None

    async def stream(self, call: Call) -> AsyncGenerator[Tensors, None]:
        """The answers of a decoupled model.  Raises AnswerError. Closing it early cancels the request."""
        stream = self._stub.ModelStreamInfer()
        has_failed = False
        try:
            await stream.write(call.to_proto())
            await stream.done_writing()
            while (message := await stream.read()) is not grpc.aio.EOF:
                if message.error_message:
                    has_failed = True
                    raise AnswerError(message.error_message, fault_of(message.error_message))
                if message.infer_response.raw_output_contents:
                    yield _outputs(message.infer_response)
            if await stream.code() is not grpc.StatusCode.OK:
                raise _failure(await stream.code(), await stream.details())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the latter: it ended before the request was written
            raise _failure(await stream.code(), await stream.details()) from None
        finally:
            if has_failed:
                self._drain(stream)
            else:
                stream.cancel()  # no effect after the end

    def _drain(self, stream: Any) -> None:
        """Drain a stream in its own task, which a departing client cannot cancel."""
        task = asyncio.ensure_future(_drained(stream))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)


async def _drained(stream: Any) -> None:
    """Read a failed stream to its end: if it is cancelled then, server 2.51 never unloads the model."""
    await happens(_read_all(stream), _DRAIN_S)
    stream.cancel()


async def _read_all(stream: Any) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the request has the first message
        while await stream.read() is not grpc.aio.EOF:
            pass


def _failure(code: grpc.StatusCode, details: str | None) -> AnswerError:
    return AnswerError(details or code.name, _FAULTS.get(code, EngineError))


def _to_raw(values: np.ndarray) -> bytes:
    if values.dtype != np.object_:
        return values.tobytes()
    return serialize_byte_tensor(values).item() if values.size else b""


def _set(parameter: Any, value: bool | int | float | str) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and value < 1 << 63:
        parameter.int64_param = value
    elif isinstance(value, int):
        parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _outputs(response: Any) -> Tensors:
    return {
        output.name: _from_raw(raw, output.datatype).reshape(tuple(output.shape))
        for output, raw in zip(response.outputs, response.raw_output_contents)
    }


def _from_raw(raw: bytes, datatype: str) -> np.ndarray:
    return deserialize_bytes_tensor(raw) if datatype == "BYTES" else np.frombuffer(raw, triton_to_np_dtype(datatype))
