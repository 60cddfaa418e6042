"""One streamed generation over gRPC for the terminal's verbs; needs tritonclient, but not the gateway's packages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from slipstream.server.generation import Generation, Response


def connect(url: str) -> tuple[Any, Any]:
    """(channel, stub). Call it on the event loop that uses them."""
    try:
        import grpc
        from tritonclient.grpc import service_pb2_grpc
    except ImportError as error:
        raise ConfigError("tritonclient", error.name, "not installed; pip install 'tritonclient[grpc]'") from None
    channel = grpc.aio.insecure_channel(url, options=[("grpc.max_receive_message_length", -1)])
    return channel, service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def generate(stub: Any, generation: Generation) -> AsyncIterator[Response]:
    """Stream the responses. Leaving the loop cancels. Raises RequestError with the server's message."""
    import grpc

    from slipstream.server.generation import Response

    call = stub.ModelStreamInfer()
    positions: dict[str, int] = {}
    try:
        await call.write(generation.to_proto())
        await call.done_writing()
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                break
            if message.error_message:
                error = message.error_message
                while message is not grpc.aio.EOF and message.infer_response.parameters:  # see server/triton.py, _drain
                    message = await call.read()
                raise RequestError("the server says", error)
            found = message.infer_response
            positions = positions or {output.name: index for index, output in enumerate(found.outputs)}
            if found.raw_output_contents:
                yield Response(positions, found.raw_output_contents)
        if await call.code() is not grpc.StatusCode.OK:
            raise RequestError("the server says", await call.details() or str(await call.code()))
    except grpc.aio.AioRpcError as error:
        raise _refusal(error) from None
    finally:
        call.cancel()


def _refusal(error: Any) -> RequestError:
    details = error.details() or str(error.code())
    if "failed to connect" in details:
        advice = "start one with `slipstream serve`, or give HOST:PORT of its gRPC"
        return RequestError("--url", f"no server answers there; {advice} ({details})")
    return RequestError("the server says", details)


async def model_parameters(stub: Any, model: str) -> dict[str, str]:
    """The parameters of a model's config.pbtxt. Raises RequestError if there is no such model or no server."""
    import grpc
    from tritonclient.grpc import service_pb2

    try:
        reply = await stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=10)
    except grpc.aio.AioRpcError as error:
        raise _refusal(error) from None
    return {name: value.string_value for name, value in reply.config.parameters.items()}
