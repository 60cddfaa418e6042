"""Tests the engine's end of the socket: the test plays the backend, a null model serves in this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import backend_wire
from slipstream.core.config_parse import parse_config
from slipstream.engine.server import GenerateServer
from slipstream.engine.socket import EngineLink
from slipstream.protocol import wire
from slipstream.protocol.wire import DataType, FrameType, ResponseFlag

TOKEN = bytes(range(16))
TIMEOUT_S = 60


def completed(config: dict[str, Any], parameters: dict[str, Any]) -> str:
    """A model's config as the C++ side sends it, with the transaction policy filled in."""
    values = {key: {"string_value": str(value)} for key, value in parameters.items()}
    return json.dumps({**config, "parameters": values, "model_transaction_policy": {"decoupled": True}})


class Backend:
    """The backend's end: listens, sends frames, stores received frames by kind."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "engine.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)
        self._frames = wire.FrameBuffer()
        self._received: list[tuple[FrameType, bytes]] = []

    def accept(self) -> None:
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(TIMEOUT_S)
        assert self.next(FrameType.HELLO) == wire.encode_hello(TOKEN)[wire.FRAME_HEADER_BYTES :]

    def next(self, kind: FrameType) -> bytes:
        """The next frame of a kind; skips METRICS frames."""
        while True:
            while self._received:
                got, payload = self._received.pop(0)
                if got is kind:
                    return payload
                assert got is FrameType.METRICS, f"waiting for {kind.name}, got {got.name}: {payload[:200]!r}"
            data = self.connection.recv(1 << 20)
            assert data, f"the engine closed the connection before {kind.name}"
            self._received += self._frames.feed(data)

    def configure(self, parameters: dict[str, Any]) -> None:
        config = completed({"name": "m"}, parameters)
        self.connection.sendall(backend_wire.encode_config(wire.Config("m", 1, "/nowhere", config)))

    def request(self, handle: int, max_tokens: int, text: str = "def f(x):", **parameters: Any) -> None:
        given = wire.Tensor("text_input", DataType.BYTES, (1,), wire.bytes_tensor([text.encode()]))
        settings = {"max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True, **parameters}
        request_id, outputs = settings.pop("request_id", ""), settings.pop("outputs", ("text_output",))
        raw = wire.Request(handle, time.time_ns(), 0, request_id, outputs, (given,), settings)
        self.connection.sendall(backend_wire.encode_request(raw))

    def responses_of(self, handle: int) -> list[backend_wire.Response]:
        """All responses of one request up to its final one; drops those of others."""
        found: list[backend_wire.Response] = []
        while not (found and found[-1].flags & ResponseFlag.FINAL):
            found += [r for r in backend_wire.decode_responses(self.next(FrameType.RESPONSES)) if r.handle == handle]
        return found

    def close(self) -> None:
        self.connection.close()
        self._listener.close()


class InThread:
    """A GenerateServer with a null model, on a thread of this process."""

    def __init__(self, backend: Backend, checkpoint: Path, **further: object) -> None:
        """further: parameters of the model."""
        self.status: int | None = None
        self.num_steps = 0
        parameters = {"model": checkpoint, "load_format": "null", "num_blocks": 256, "stop_by_request_id": "true"}
        parameters |= further
        config = parse_config(wire.Config("m", 1, "/nowhere", completed({}, parameters)))
        link = EngineLink(backend.path, TOKEN)
        backend.accept()
        self.server = GenerateServer(link, config)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        backend.next(FrameType.READY)

    def _serve(self) -> None:
        self.status = self.server.serve()

    def join(self) -> int | None:
        self._thread.join(TIMEOUT_S)
        return self.status

    def slow_down(self, step_s: float) -> None:
        """Slow down steps, so that a request is still running when the test acts on it."""
        step = self.server._engine.step

        def slow() -> Any:
            time.sleep(step_s)
            outputs = step()
            self.num_steps += 1
            return outputs

        self.server._engine.step = slow  # type: ignore[method-assign]
