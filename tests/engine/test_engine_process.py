"""The engine's end of the socket, with the test as the backend: handshake, drain, stop, failure, broken frames.

Most run the server in this process on a null model (no weights, no computing); what concerns exit codes starts the
real process with a tokenizer task, which needs no torch.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import backend_wire
import pytest
from engine_peer import TIMEOUT_S, TOKEN, Backend, InThread
from patience import wait_until
from slipstream.core import stats
from slipstream.core.errors import RankLostError
from slipstream.engine.heap import HeapTrimmer
from slipstream.engine.main import run
from slipstream.engine.socket import EngineLink
from slipstream.protocol import contract, wire
from slipstream.protocol.wire import DataType, ErrorCode, FrameType, ResponseFlag
from slipstream.tokenizer.tokenizer import TextTokenizer


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
    assert all(wire_string(spec.family) in ready for spec in stats.METRICS if "method" not in spec.labels)
    assert b"slipstream_spec_position" not in ready, "drafts of a method that is not loaded"


def test_a_stream_is_whole_and_ends_with_final(backend: Backend, null_server: InThread) -> None:
    backend.request(7, 20)
    responses = backend.responses_of(7)
    assert len(responses) == 20
    assert [r.flags for r in responses] == [0] * 19 + [ResponseFlag.FINAL]


def test_the_heap_is_looked_after_while_it_serves(
    backend: Backend, null_server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[HeapTrimmer] = []
    monkeypatch.setattr(HeapTrimmer, "check", lambda heap: checks.append(heap))
    null_server.slow_down(0.005)
    backend.request(1, 200)
    backend.responses_of(1)
    assert 1 <= len(checks) <= 50


def test_bad_requests_are_answered_and_disturb_nobody(backend: Backend, null_server: InThread) -> None:
    null_server.slow_down(0.005)
    backend.request(1, 30)
    backend.request(2, 5, temprature=1)
    [refused] = backend.responses_of(2)
    assert refused.error_code == ErrorCode.INVALID_ARG and "temprature" in refused.error_message
    backend.request(3, 5)
    assert backend.responses_of(3)[-1].flags == ResponseFlag.FINAL


def test_drain_finishes_what_runs_and_refuses_what_comes(backend: Backend, null_server: InThread) -> None:
    null_server.slow_down(0.005)
    backend.request(1, 100)
    backend.next(FrameType.RESPONSES)
    backend.connection.sendall(backend_wire.encode_drain(60_000))
    backend.request(2, 5)
    seen: dict[int, list[backend_wire.Response]] = {1: [], 2: []}
    while not all(found and found[-1].flags & ResponseFlag.FINAL for found in seen.values()):
        for response in backend_wire.decode_responses(backend.next(FrameType.RESPONSES)):
            seen[response.handle].append(response)
    assert not seen[1][-1].flags & ResponseFlag.ERROR
    assert seen[2][-1].error_code == ErrorCode.UNAVAILABLE
    backend.next(FrameType.DRAINED)
    assert null_server.join() == 0


def test_a_drain_that_takes_too_long_answers_the_rest(backend: Backend, null_server: InThread) -> None:
    null_server.slow_down(0.01)
    backend.request(1, 900)
    backend.next(FrameType.RESPONSES)
    backend.connection.sendall(backend_wire.encode_drain(100))
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
    backend.connection.sendall(backend_wire.encode_cancel(2))
    finals: set[int] = set()
    while finals != {1, 2, 3}:
        responses = backend_wire.decode_responses(backend.next(FrameType.RESPONSES))
        finals |= {r.handle for r in responses if r.flags & ResponseFlag.FINAL}
    assert null_server.num_steps - max(told) <= 2
    engine = null_server.server._engine
    assert engine.scheduler.num_running == 0
    assert engine.scheduler.cache.num_used_blocks == 0


@pytest.mark.parametrize("end", ["refused", "stopped", "ended"])
def test_of_requests_with_one_id_the_newest_that_runs_is_stopped(
    backend: Backend, null_server: InThread, end: str
) -> None:
    null_server.slow_down(0.02)
    backend.request(1, 900, request_id="one")
    backend.next(FrameType.RESPONSES)
    backend.request(2, {"ended": 1}.get(end, 900), request_id="one", **({"top_p": 2.0} if end == "refused" else {}))
    if end == "stopped":
        backend.request(3, 1, request_id="one", stop=True)
    last = backend.responses_of(2)[-1]
    assert last.error_code == (ErrorCode.INVALID_ARG if end == "refused" else 0)
    backend.request(4, 1, request_id="one", stop=True)
    backend.responses_of(1)
    assert null_server.num_steps < 500, "it was not stopped"
    wait_until(lambda: not null_server.server._ids, "the ids to be forgotten")


def test_a_large_stop_request_stops_the_other_and_leaves_nothing(backend: Backend, null_server: InThread) -> None:
    null_server.slow_down(0.02)
    backend.request(1, 900, request_id="one")
    backend.next(FrameType.RESPONSES)
    backend.request(2, 1, text=LARGE, request_id="one", stop=True)
    finals: dict[int, int] = {}
    while finals.keys() != {1, 2}:
        responses = backend_wire.decode_responses(backend.next(FrameType.RESPONSES))
        finals |= {r.handle: r.error_code for r in responses if r.flags & ResponseFlag.FINAL}
    assert null_server.num_steps < 500 and finals[2] == 0
    assert not null_server.server._ids


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"id": "x" * 1025}, "id: got 1025 bytes, accepted: at most 1024"),
        ({"id": "x" * 5000}, "id: got 5000 bytes, accepted: at most 1024"),
        ({"sampling_parameters": '{"request_id": "one"}'}, "request_id: unknown"),
    ],
)
def test_no_id_is_larger_than_what_is_read_of_a_large_request_at_once(
    backend: Backend, null_server: InThread, given: dict[str, str], words: str
) -> None:
    """Else it would run with an id that nobody knows, and no stop request would find it."""
    for number, text in enumerate(["def f(x):", LARGE], 1):
        backend.request(number, 1, text=text, **given)
        (answer,) = backend.responses_of(number)
        assert answer.error_code == ErrorCode.INVALID_ARG and words in answer.error_message
    assert not null_server.server._ids


def test_a_large_request_that_is_refused_at_once_leaves_nothing(
    backend: Backend, null_server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = null_server.server
    put = server._pool.put

    def put_and_wait(raw: wire.Request, deadline: float | None, known: object) -> None:
        put(raw, deadline, known)
        assert server._pool.wait_empty(TIMEOUT_S)  # the pool's thread is done before the socket's goes on

    monkeypatch.setattr(server._pool, "put", put_and_wait)
    backend.request(1, 5, text=LARGE, request_id="one", top_p=2.0)
    (answer,) = backend.responses_of(1)
    assert answer.error_code == ErrorCode.INVALID_ARG
    backend.request(2, 1)
    backend.responses_of(2)
    assert not server._ids


def test_a_cancel_that_comes_before_the_grammar_is_compiled(backend: Backend, null_server: InThread) -> None:
    """It waits for that in the scheduler's queue, like any other: the cancel is heard at once."""
    backend.request(1, 900, guided_decoding_guide_type="regex", guided_decoding_guide="( a)*")
    backend.connection.sendall(backend_wire.encode_cancel(1))
    (answer,) = backend.responses_of(1)
    assert answer.flags & ResponseFlag.FINAL, "it was cancelled before it began"


LARGE = "x = 1\n" * 1600  # more than is read on the socket's thread, less than max_model_len
ENDS = ("text_output", "finish_reason")


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


def reasons_of(responses: list[backend_wire.Response]) -> list[bytes]:
    """Texts and finish reasons of ordinary responses: none is an error, the last is final."""
    assert [response.flags for response in responses] == [0] * (len(responses) - 1) + [ResponseFlag.FINAL]
    return [data for response in responses for _, _, data in response.outputs]


def test_cancels_stops_and_deadlines_reach_requests_that_wait_to_be_tokenised(
    backend: Backend, null_server: InThread, slow_tokenizer: threading.Event
) -> None:
    """They end as the engine ends what waits there: with a finish reason, a response per sequence that streams."""
    backend.request(1, 5, text=LARGE, outputs=ENDS)
    for handle in (2, 3, 8):
        backend.request(handle, 5, text=LARGE, request_id=f"r{handle}", outputs=ENDS)
    backend.request(4, 5, text=LARGE, timeout_ms=50, n=2, outputs=ENDS)
    cancelled, late = [wire.bytes_tensor([b""]), wire.bytes_tensor([b"cancelled"])], wire.bytes_tensor([b"timeout"])
    backend.connection.sendall(backend_wire.encode_cancel(2))
    assert reasons_of(backend.responses_of(2)) == cancelled
    backend.request(5, 1, request_id="r3", stop=True)
    assert reasons_of(backend.responses_of(3)) == cancelled
    backend.request(9, 1, request_id="r8", text=LARGE, stop=True)  # with the prompt that it stops, as some clients do
    assert reasons_of(backend.responses_of(8)) == cancelled
    assert reasons_of(backend.responses_of(4)) == 2 * [wire.bytes_tensor([b""]), late]
    backend.request(7, 5, text=LARGE, timeout_ms=50, n=2, stream=False, outputs=ENDS)
    assert reasons_of(backend.responses_of(7)) == [wire.bytes_tensor([b"", b""]), 2 * late]
    backend.connection.sendall(backend_wire.encode_cancel(1))
    backend.request(6, 3)
    assert len(backend.responses_of(6)) == 3
    slow_tokenizer.set()
    assert reasons_of(backend.responses_of(1)) == cancelled
    wait_until(lambda: null_server.server._pool.is_empty, "the pool to be empty")
    assert not null_server.server._live and not null_server.server._ids


def test_a_lost_rank_ends_all_requests_and_the_connection(backend: Backend, null_server: InThread) -> None:
    """One that comes between the loss and the end is refused; then nothing is read, and the backend knows it."""
    server, may_end = null_server.server, threading.Event()
    fail_everything = server._fail_everything
    server._fail_everything = lambda: (may_end.wait(TIMEOUT_S), fail_everything())  # type: ignore[method-assign]
    null_server.slow_down(0.005)
    backend.request(1, 1000)
    wait_until(lambda: null_server.num_steps > 3, "the request to run")
    server._lose(RankLostError("rank 1 has ended: the model starts again"))
    backend.request(2, 5)
    answers = [backend.responses_of(2)[-1]]
    may_end.set()
    answers.append(backend.responses_of(1)[-1])
    for answer in answers:
        assert answer.error_code == ErrorCode.UNAVAILABLE and "rank 1 has ended" in answer.error_message
    backend.connection.settimeout(10)
    while backend.connection.recv(1 << 20):
        pass
    assert null_server.join() == 1


def test_a_drain_waits_for_what_is_tokenised_and_answers_it_in_the_end(
    backend: Backend, null_server: InThread, slow_tokenizer: threading.Event
) -> None:
    backend.request(1, 5, text=LARGE)
    backend.request(2, 5, text=LARGE)
    backend.connection.sendall(backend_wire.encode_drain(500))
    errors: dict[int, str] = {}
    while set(errors) != {1, 2}:
        for response in backend_wire.decode_responses(backend.next(FrameType.RESPONSES)):
            errors[response.handle] = response.error_message
    assert set(errors.values()) == {"the model was unloaded before the request ended"}
    backend.next(FrameType.DRAINED)
    slow_tokenizer.set()
    assert null_server.join() == 0


def test_a_large_request_that_waits_finishes_within_a_drain(
    backend: Backend, null_server: InThread, slow_tokenizer: threading.Event
) -> None:
    backend.request(1, 5, text=LARGE)
    backend.connection.sendall(backend_wire.encode_drain(60_000))
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


# ---------------------------------------------------------------- the process


@pytest.fixture
def process(backend: Backend, demo_model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The engine process of a tokenize model, before its CONFIG."""
    command = [sys.executable, "-m", "slipstream.engine.main", "--socket", backend.path, "--token", TOKEN.hex()]
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


def _query(handle: int, text: str) -> bytes:
    query = wire.Tensor("QUERY", DataType.BYTES, (1,), wire.bytes_tensor([text.encode()]))
    return backend_wire.encode_request(
        wire.Request(handle, time.time_ns(), 0, "", ("REQUEST_INPUT_LEN",), (query,), {})
    )


def test_preprocessing_answers_small_and_large_prompts_and_drains(
    backend: Backend, process: subprocess.Popen[bytes], demo_model: Path
) -> None:
    backend.configure({"task": "tokenize", "tokenizer_dir": demo_model})
    backend.next(FrameType.READY)
    texts = {1: LARGE, 2: "x = 1", 3: LARGE * 10, 4: " " * 9000, 5: "x"}
    for handle, text in texts.items():
        backend.connection.sendall(_query(handle, text))
    backend.connection.sendall(backend_wire.encode_drain(60_000))
    found: dict[int, backend_wire.Response] = {}
    while len(found) < len(texts):
        found |= {r.handle: r for r in backend_wire.decode_responses(backend.next(FrameType.RESPONSES))}
    assert "QUERY: the prompt has 96000 bytes, accepted: at most 57344" in found.pop(3).error_message
    tokenizer = TextTokenizer.load(demo_model)
    for handle, response in found.items():
        [(_, _, length)] = response.outputs
        assert int.from_bytes(length, "little") == len(tokenizer.encode(texts[handle]))
    backend.next(FrameType.DRAINED)
    assert process.wait(TIMEOUT_S) == 0


def test_the_process_drains(backend: Backend, process: subprocess.Popen[bytes], demo_model: Path) -> None:
    backend.configure({"task": "detokenize", "tokenizer_dir": demo_model})
    backend.next(FrameType.READY)
    backend.connection.sendall(backend_wire.encode_drain(1000))
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
