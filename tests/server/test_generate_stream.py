"""The gateway's end of one gRPC stream, against a stand-in for the call."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fake_triton import FakeTriton
from patience import PATIENCE_S
from slipstream.server import triton
from slipstream.server.errors import ApiError
from slipstream.server.triton import GenerateStream, TritonLink
from tritonclient.grpc import service_pb2


class EndlessCall:
    """An error, and then nothing, not even the end: what server 2.51 may leave of a stream when its model goes."""

    def __init__(self) -> None:
        self._is_first = True

    async def read(self) -> service_pb2.ModelStreamInferResponse:
        if not self._is_first:
            await asyncio.Event().wait()
        self._is_first = False
        return service_pb2.ModelStreamInferResponse(error_message="the engine of model 'llm' was killed")


def test_an_error_is_told_though_its_stream_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "END_TIMEOUT_S", 0.05)

    async def read() -> None:
        await asyncio.wait_for(GenerateStream(EndlessCall(), service_pb2.ModelInferRequest()).read(), 10)

    with pytest.raises(ApiError, match="was killed"):
        asyncio.run(read())


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 10])
def test_a_stream_that_is_cancelled_before_its_request_is_sent_ends(
    fake_triton: FakeTriton, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_steps: of the event loop between the start and the cancellation. gRPC would wait for ever after 1 to 3.

    The server answers nothing before that, also where it has got the request already."""
    is_over = threading.Event()
    monkeypatch.setattr(fake_triton, "_refusal", lambda request: is_over.wait(PATIENCE_S) and "too late")

    async def run() -> None:
        link = TritonLink(fake_triton.url)
        stream = GenerateStream(link._stub.ModelStreamInfer(), service_pb2.ModelInferRequest(model_name="plain"))

        async def first() -> None:
            await stream.start()
            await stream.read()

        answer = asyncio.create_task(first())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        stream.cancel()
        ended, _ = await asyncio.wait([answer], timeout=10)
        assert ended and answer.cancelled()
        await link.close()

    try:
        asyncio.run(run())
    finally:
        is_over.set()
