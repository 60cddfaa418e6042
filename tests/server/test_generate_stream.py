"""The gateway's end of one gRPC stream, against a stand-in for the call."""

from __future__ import annotations

import asyncio

import pytest
from slipstream.server import triton
from slipstream.server.errors import ApiError
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
        await asyncio.wait_for(triton.GenerateStream(EndlessCall(), service_pb2.ModelInferRequest()).read(), 10)

    with pytest.raises(ApiError, match="was killed"):
        asyncio.run(read())
