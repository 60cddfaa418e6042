"""The engine's end of the socket, with the test as the backend: handshake, drain, stop, failure, broken frames.

Most run the server in this process on a null model (no weights, no computing); what concerns exit codes starts the
real process with a tokenizer task, which needs no torch.
"""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from slipstream.core import contract, stats, wire
from slipstream.core.config_parse import parse_config
from slipstream.core.wire import DataType, ErrorCode, FrameType, ResponseFlag
from slipstream.runtime.link import EngineLink
from slipstream.runtime.main import run
from slipstream.runtime.server import GenerateServer

TOKEN = bytes(range(16))
TIMEOUT_S = 60


def completed(config: dict[str, Any], parameters: dict[str, Any]) -> str:
    """A model's config as the C++ side sends it: with the policy that config.pbtxt left out."""
    values = {key: {"string_value": str(value)} for key, value in parameters.items()}
    return json.dumps({**config, "parameters": values, "model_transaction_policy": {"decoupled": True}})


class Backend:
    """The other end: listens, sends frames, keeps what comes back by kind."""

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
        """The next frame of a kind; METRICS frames on the way are passed over."""
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
        self.connection.sendall(wire.encode_config(wire.Config("m", 1, "/nowhere", config)))

    def request(self, handle: int, max_tokens: int, text: str = "def f(x):", **parameters: Any) -> None:
        given = wire.Tensor("text_input", DataType.BYTES, (1,), wire.bytes_tensor([text.encode()]))
        settings = {"max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True, **parameters}
        request_id = settings.pop("request_id", "")
        raw = wire.Request(handle, time.time_ns(), 0, request_id, ("text_output",), (given,), settings)
        self.connection.sendall(wire.encode_request(raw))

    def responses_of(self, handle: int) -> list[wire.Response]:
        """All responses of one request, to its last; those of others are dropped."""
        found: list[wire.Response] = []
        while not (found and found[-1].flags & ResponseFlag.FINAL):
            found += [r for r in wire.decode_responses(self.next(FrameType.RESPONSES)) if r.handle == handle]
        return found

    def close(self) -> None:
        self.connection.close()
        self._listener.close()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    one = Backend(tmp_path)
    yield one
    one.close()
    gc.unfreeze()  # a server in this process has frozen everything


class InThread:
    """A GenerateServer with a null model, on a thread of this process."""

    def __init__(self, backend: Backend, checkpoint: Path) -> None:
        self.status: int | None = None
        self.num_steps = 0
        parameters = {"model": checkpoint, "load_format": "null", "num_blocks": 256, "stop_by_request_id": "true"}
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
        """So that a request is still running when the test does something to it."""
        step = self.server._engine.step

        def slow() -> Any:
            time.sleep(step_s)
            outputs = step()
            self.num_steps += 1
            return outputs

        self.server._engine.step = slow  # type: ignore[method-assign]


@pytest.fixture
def null_server(backend: Backend, demo_model: Path) -> InThread:
    return InThread(backend, demo_model)


def wire_string(text: str) -> bytes:
    return len(text).to_bytes(2, "little") + text.encode()


def test_ready_names_outputs_and_metrics_in_order(backend: Backend, demo_model: Path) -> None:
    link = EngineLink(backend.path, TOKEN)
    backend.accept()
    backend.configure({"model": demo_model, "load_format": "null"})
    threading.Thread(target=run, args=(link,), daemon=True).start()
    ready = backend.next(FrameType.READY)
    names = [wire_string(output.name) for output in contract.OUTPUTS["generate"]]
    assert [ready.index(name) for name in names] == sorted(ready.index(name) for name in names)
    assert all(wire_string(metric.family) in ready for metric in stats.METRICS)


def test_a_stream_is_whole_and_ends_with_final(backend: Backend, null_server: InThread) -> None:
    backend.request(7, 20)
    responses = backend.responses_of(7)
    assert len(responses) == 20
    assert [r.flags for r in responses] == [0] * 19 + [ResponseFlag.FINAL]


def test_bad_requests_are_answered_and_disturb_nobody(backend: Backend, null_server: InThread) -> None:
    null_server.slow_down(0.005)
    backend.request(1, 30)
    backend.request(2, 5, temprature=1)
    [refused] = backend.responses_of(2)
    assert refused.error_code == ErrorCode.INVALID_ARG and "temprature" in refused.error_message
    backend.request(3, 5)
    assert backend.responses_of(3)[-1].flags == ResponseFlag.FINAL


UNREADABLE = wire.encode_request(wire.Request(2, 0, 0, "", (), (), {"x": 1.5}))


@pytest.mark.parametrize("damage", [b"", b"\x07", b"\xff" * 40], ids=["cut", "cut elsewhere", "no such count"])
def test_a_frame_that_cannot_be_read_answers_its_own_request_alone(
    backend: Backend, null_server: InThread, damage: bytes
) -> None:
    null_server.slow_down(0.005)
    backend.request(1, 30)
    backend.next(FrameType.RESPONSES)
    payload = UNREADABLE[wire.FRAME_HEADER_BYTES : -20] + damage
    backend.connection.sendall(wire.encode_frame(FrameType.REQUEST, payload))
    [refused] = backend.responses_of(2)
    assert refused.error_code == ErrorCode.INTERNAL and refused.error_message.startswith("internal error ")
    backend.request(3, 5)
    assert backend.responses_of(3)[-1].flags == ResponseFlag.FINAL


def test_an_unforeseen_exception_is_not_told_to_clients(
    backend: Backend, null_server: InThread, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("/srv/secret/prompt of somebody else")

    null_server.server._engine.submit = broken  # type: ignore[method-assign]
    backend.request(1, 5)
    [refused] = backend.responses_of(1)
    assert refused.error_code == ErrorCode.INTERNAL and "secret" not in refused.error_message
    number = refused.error_message.split(":")[0]
    assert f"{number}: " in caplog.text and "secret" in caplog.text


def test_a_response_that_no_frame_should_hold_fails_its_own_request_alone(
    backend: Backend, null_server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    null_server.slow_down(0.005)
    monkeypatch.setattr(wire, "MAX_RESPONSE_BYTES", 100)
    backend.request(1, 60)
    backend.next(FrameType.RESPONSES)
    backend.request(2, 50, stream=False, n=3)
    [refused] = backend.responses_of(2)
    assert refused.error_code == ErrorCode.INVALID_ARG and "accepted: at most 100" in refused.error_message
    backend.request(3, 5)
    assert backend.responses_of(3)[-1].flags == ResponseFlag.FINAL
    wait_until(lambda: not null_server.server._live, "the first request to end")
    assert null_server.server._engine.scheduler.cache.num_used_blocks == 0


def test_drain_finishes_what_runs_and_refuses_what_comes(backend: Backend, null_server: InThread) -> None:
    null_server.slow_down(0.005)
    backend.request(1, 100)
    backend.next(FrameType.RESPONSES)
    backend.connection.sendall(wire.encode_drain(60_000))
    backend.request(2, 5)
    seen: dict[int, list[wire.Response]] = {1: [], 2: []}
    while not all(found and found[-1].flags & ResponseFlag.FINAL for found in seen.values()):
        for response in wire.decode_responses(backend.next(FrameType.RESPONSES)):
            seen[response.handle].append(response)
    assert not seen[1][-1].flags & ResponseFlag.ERROR
    assert seen[2][-1].error_code == ErrorCode.UNAVAILABLE
    backend.next(FrameType.DRAINED)
    assert null_server.join() == 0


def test_a_drain_that_takes_too_long_answers_the_rest(backend: Backend, null_server: InThread) -> None:
    null_server.slow_down(0.01)
    backend.request(1, 900)
    backend.next(FrameType.RESPONSES)
    backend.connection.sendall(wire.encode_drain(100))
    last = backend.responses_of(1)[-1]
    assert last.error_code == ErrorCode.UNAVAILABLE
    backend.next(FrameType.DRAINED)
    assert null_server.join() == 0


def test_stop_by_request_id_and_cancel_by_handle_within_two_steps(
    backend: Backend, null_server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    null_server.slow_down(0.05)
    backend.request(1, 900, request_id="one")
    backend.request(2, 900)
    backend.next(FrameType.RESPONSES)
    cancel, told = null_server.server._engine.cancel, []

    def note_and_cancel(handle: int) -> None:
        cancel(handle)
        told.append(null_server.num_steps)

    monkeypatch.setattr(null_server.server._engine, "cancel", note_and_cancel)
    backend.request(3, 1, request_id="one", stop=True)
    backend.connection.sendall(wire.encode_cancel(2))
    finals: set[int] = set()
    while finals != {1, 2, 3}:
        responses = wire.decode_responses(backend.next(FrameType.RESPONSES))
        finals |= {r.handle for r in responses if r.flags & ResponseFlag.FINAL}
    assert null_server.num_steps - max(told) <= 2
    engine = null_server.server._engine
    assert engine.scheduler.num_running == 0
    assert engine.scheduler.cache.num_used_blocks == 0


def test_a_cancel_that_comes_before_the_grammar_is_compiled(
    backend: Backend, null_server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = null_server.server._engine.submit

    def slow_submit(request: Any) -> Any:
        wait_until(lambda: 1 in null_server.server._cancelled_early, "the cancel to come")
        return submit(request)

    monkeypatch.setattr(null_server.server._engine, "submit", slow_submit)
    backend.request(1, 900, guided_decoding_guide_type="regex", guided_decoding_guide="( a)*")
    backend.connection.sendall(wire.encode_cancel(1))
    assert len(backend.responses_of(1)) < 10, "it was cancelled before it began"


LARGE = "x = 1\n" * 1600  # more than is read on the socket's thread, less than max_model_len


@pytest.fixture
def slow_tokenizer(null_server: InThread, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Large texts are encoded when the event is set."""
    may_encode = threading.Event()
    tokenizer = null_server.server._engine.tokenizer
    encode = tokenizer.encode

    def slow_encode(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 8192:
            assert may_encode.wait(TIMEOUT_S)
            text = text[:100]
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", slow_encode)
    return may_encode


def test_small_requests_pass_a_large_one_that_is_tokenised(backend: Backend, slow_tokenizer: threading.Event) -> None:
    backend.request(1, 5, text=LARGE)
    backend.request(2, 5)
    assert len(backend.responses_of(2)) == 5, "while the first is still being tokenised"
    slow_tokenizer.set()
    assert len(backend.responses_of(1)) == 5


def test_cancels_stops_and_deadlines_reach_requests_that_wait_to_be_tokenised(
    backend: Backend, null_server: InThread, slow_tokenizer: threading.Event
) -> None:
    backend.request(1, 5, text=LARGE)
    for handle in (2, 3):
        backend.request(handle, 5, text=LARGE, request_id=f"r{handle}")
    backend.request(4, 5, text=LARGE, timeout_ms=50)
    backend.connection.sendall(wire.encode_cancel(2))
    assert backend.responses_of(2)[-1].error_message == "cancelled while it waited to be tokenised"
    backend.request(5, 1, request_id="r3", stop=True)
    assert backend.responses_of(3)[-1].error_message == "cancelled while it waited to be tokenised"
    assert backend.responses_of(4)[-1].error_message == "timed out while it waited to be tokenised"
    backend.connection.sendall(wire.encode_cancel(1))
    backend.request(6, 3)
    assert len(backend.responses_of(6)) == 3
    slow_tokenizer.set()
    assert backend.responses_of(1)[-1].flags & ResponseFlag.FINAL
    wait_until(lambda: null_server.server._pool.is_empty, "the pool to be empty")
    assert not null_server.server._live and not null_server.server._handles_by_id


def test_a_drain_waits_for_what_is_tokenised_and_answers_it_in_the_end(
    backend: Backend, null_server: InThread, slow_tokenizer: threading.Event
) -> None:
    backend.request(1, 5, text=LARGE)
    backend.request(2, 5, text=LARGE)
    backend.connection.sendall(wire.encode_drain(500))
    errors: dict[int, str] = {}
    while set(errors) != {1, 2}:
        for response in wire.decode_responses(backend.next(FrameType.RESPONSES)):
            errors[response.handle] = response.error_message
    assert set(errors.values()) == {"the model was unloaded before the request ended"}
    backend.next(FrameType.DRAINED)
    slow_tokenizer.set()
    assert null_server.join() == 0


def test_a_large_request_that_waits_finishes_within_a_drain(
    backend: Backend, null_server: InThread, slow_tokenizer: threading.Event
) -> None:
    backend.request(1, 5, text=LARGE)
    backend.connection.sendall(wire.encode_drain(60_000))
    slow_tokenizer.set()
    assert len(backend.responses_of(1)) == 5
    backend.next(FrameType.DRAINED)
    assert null_server.join() == 0


def test_a_large_request_with_a_bad_setting_is_refused_at_once(
    backend: Backend, slow_tokenizer: threading.Event
) -> None:
    backend.request(1, 5, text=LARGE, temprature=1)
    assert "temprature: unknown" in backend.responses_of(1)[-1].error_message
    backend.request(2, 5, text="x" * 100_000)
    assert "text_input: the prompt has 100000 bytes, accepted: at most" in backend.responses_of(2)[-1].error_message
    slow_tokenizer.set()


def test_a_failing_engine_answers_everybody_and_exits_with_1(
    backend: Backend, null_server: InThread, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    null_server.slow_down(0.005)
    backend.request(1, 900)
    backend.request(2, 900)
    backend.next(FrameType.RESPONSES)
    null_server.server._engine._runner.forward = broken  # type: ignore[method-assign]
    errors: dict[int, wire.Response] = {}
    while set(errors) != {1, 2}:
        for response in wire.decode_responses(backend.next(FrameType.RESPONSES)):
            if response.flags & ResponseFlag.FINAL:
                errors[response.handle] = response
    assert {e.error_code for e in errors.values()} == {ErrorCode.INTERNAL}
    told = {e.error_message for e in errors.values()}
    assert len(told) == 1 and "out of luck" not in str(told)
    assert told.pop().split(":")[0] in caplog.text and "out of luck" in caplog.text
    assert null_server.join() == 1


# ---------------------------------------------------------------- the process


@pytest.fixture
def process(backend: Backend, demo_model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The engine process of a tokenize model, before its CONFIG."""
    command = [sys.executable, "-m", "slipstream.runtime.main", "--socket", backend.path, "--token", TOKEN.hex()]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as one:
        backend.accept()
        yield one
        one.kill()


def test_the_process_ends_when_the_backend_does(
    backend: Backend, process: subprocess.Popen[bytes], demo_model: Path
) -> None:
    backend.configure({"task": "tokenize", "tokenizer_dir": demo_model})
    backend.next(FrameType.READY)
    backend.connection.close()
    assert process.wait(TIMEOUT_S) == 0


def test_the_process_drains(backend: Backend, process: subprocess.Popen[bytes], demo_model: Path) -> None:
    backend.configure({"task": "detokenize", "tokenizer_dir": demo_model})
    backend.next(FrameType.READY)
    backend.connection.sendall(wire.encode_drain(1000))
    backend.next(FrameType.DRAINED)
    assert process.wait(TIMEOUT_S) == 0


def test_a_load_that_fails_says_why(backend: Backend, process: subprocess.Popen[bytes], demo_model: Path) -> None:
    backend.configure({"task": "tokenize", "tokenizer_dir": demo_model, "tokeniser": "x"})
    assert b"tokeniser" in backend.next(FrameType.LOAD_FAILED)
    assert process.wait(TIMEOUT_S) == 1


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, b"\x00\x00\x00\x00\x63", wire.encode_drained()],
    ids=["length", "type", "not from a backend"],
)
def test_garbage_ends_the_process_with_2(backend: Backend, process: subprocess.Popen[bytes], garbage: bytes) -> None:
    backend.connection.sendall(garbage)
    assert process.wait(TIMEOUT_S) == 2
    assert process.stderr is not None and process.stderr.read().startswith(b"E broken protocol")
