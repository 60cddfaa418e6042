"""What goes wrong in production, on the real server: everybody gets an answer, the service comes back, no block leaks.

Every test ends with an idle engine whose KV blocks are all free (`wait_idle`).
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_client import grpc_infer, grpc_stream, http_events, http_generate
from llm_server import ROOT, LlmServer
from patience import PATIENCE_S
from processes import asked
from sse_client import stream_many

PROMPT = "import os\n"
LONG = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}  # some seconds: what ends it is never its length
SHORT = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm_server: LlmServer) -> Iterator[None]:
    yield
    assert llm_server.is_alive()
    llm_server.wait_model_ready("llm")
    llm_server.wait_idle()
    answer = grpc_infer(llm_server.grpc_url, "llm", {"text_input": PROMPT, "stream": True}, parameters=SHORT)
    assert (answer.error, len(answer.text) > 0) == ("", True)
    llm_server.wait_idle()


def engine_of(server: LlmServer) -> Any:
    """The engine process that generates meanwhile: another test's model may be loaded beside `llm`."""

    def user_s(process: Any) -> float:
        return asked(lambda: float(process.cpu_times().user), 0.0)  # the other test's may end meanwhile

    before = {process: user_s(process) for process in server.engines()}
    time.sleep(0.3)
    return max(before, key=lambda process: user_s(process) - before[process])


def run_long(server: LlmServer, stream: Any, num_responses: int = 3, **options: Any) -> None:
    """Start a long request and wait until it streams."""
    stream.send("llm", {"text_input": PROMPT, "stream": True}, parameters=LONG, **options)
    for _ in range(num_responses):
        assert not stream.receive()[2]


# ---------------------------------------------------------------- the engine dies


def test_an_engine_killed_in_mid_stream(llm_server: LlmServer) -> None:
    restarts = llm_server.metric("slipstream_engine_restarts_total")
    with grpc_stream(llm_server.grpc_url) as stream:
        run_long(llm_server, stream)
        with http_events(llm_server.http_url, "llm", {"text_input": PROMPT, "stream": True, **LONG}) as events:
            assert "text_output" in next(events)
            engine_of(llm_server).send_signal(signal.SIGKILL)
            killed = time.monotonic()
            assert "error" in list(events)[-1]
        answer = stream.collect(timeout_s=10)
    assert "engine" in answer.error
    assert time.monotonic() - killed < 10, "the streams hung"
    # Triton unloads it on a thread of its own; a new engine needs half a second and the time to load torch
    llm_server.wait_until(lambda: not llm_server.is_model_ready("llm"), "llm not to be ready", 5)
    assert http_generate(llm_server.http_url, "llm", {"text_input": PROMPT})[0] >= 400
    llm_server.wait_model_ready("llm")
    assert llm_server.metric("slipstream_engine_restarts_total") == restarts + 1


def test_unloading_lets_a_stream_finish(llm_server: LlmServer) -> None:
    before = len(llm_server.engines())
    with llm_server.variant("unloaded", {}) as model, grpc_stream(llm_server.grpc_url) as stream:
        sampling = {**LONG, "max_tokens": 60}
        stream.send(model, {"text_input": PROMPT, "stream": True}, parameters=sampling)
        assert not stream.receive()[2]
        llm_server.unload(model)
        answer = stream.collect()
        assert answer.error == "" and len(answer.responses) > 40
    llm_server.wait_until(lambda: len(llm_server.engines()) == before, "the unloaded model's engine to end")


# ---------------------------------------------------------------- the client goes


def wait_cancelled(server: LlmServer, before: float) -> None:
    server.wait_until(lambda: server.metric("slipstream_cancellations_total") > before, "the request to be cancelled")
    server.wait_idle()


def test_a_grpc_stream_is_cancelled(llm_server: LlmServer) -> None:
    before = llm_server.metric("slipstream_cancellations_total")
    with grpc_stream(llm_server.grpc_url, cancel=True) as stream:
        run_long(llm_server, stream)
    wait_cancelled(llm_server, before)


def test_a_client_process_is_killed(llm_server: LlmServer) -> None:
    before = llm_server.metric("slipstream_cancellations_total")
    command = [sys.executable, str(ROOT / "client_examples/stream.py"), "--url", llm_server.grpc_url]
    client = subprocess.Popen([*command, "--max-tokens", str(LONG["max_tokens"])], stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.read(10)
    client.kill()
    client.wait()
    client.stdout.close()
    wait_cancelled(llm_server, before)


def test_an_http_connection_is_closed(llm_server: LlmServer) -> None:
    before = llm_server.metric("slipstream_cancellations_total")
    with http_events(llm_server.http_url, "llm", {"text_input": PROMPT, "stream": True, **LONG}) as events:
        next(events)
    wait_cancelled(llm_server, before)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_stop_request_ends_the_request_of_its_id(llm_server: LlmServer, protocol: str) -> None:
    before = llm_server.metric("slipstream_cancellations_total")
    with grpc_stream(llm_server.grpc_url) as stream:
        run_long(llm_server, stream, request_id="to-be-stopped")
        if protocol == "grpc":
            stopped = grpc_infer(llm_server.grpc_url, "llm", {"stop": True}, request_id="to-be-stopped")
            assert (stopped.error, stopped.text) == ("", "")
        else:
            status, reply = http_generate(llm_server.http_url, "llm", {"id": "to-be-stopped", "stop": True})
            assert (status, reply["text_output"]) == (200, "")
        stream.collect()
    wait_cancelled(llm_server, before)


@pytest.mark.parametrize("how", ["cancel", "stop", "http"])
def test_a_request_through_the_ensemble_is_stopped(llm_server: LlmServer, how: str) -> None:
    """Triton does not pass a cancel on to a running step of an ensemble: the watchdog and the stop request do."""
    before = llm_server.metric("slipstream_cancellations_total")
    inputs = {"text_input": PROMPT, "stream": True, "max_tokens": LONG["max_tokens"], "end_id": -1}  # no token ends it
    if how == "http":
        with http_events(llm_server.http_url, "ensemble", inputs) as events:
            next(events)
    else:
        with grpc_stream(llm_server.grpc_url, cancel=how == "cancel") as stream:
            stream.send("ensemble", inputs, batched=True, request_id="through-the-ensemble")
            for _ in range(3):
                assert not stream.receive()[2]
            if how == "stop":
                stopped = grpc_infer(llm_server.grpc_url, "llm", {"stop": True}, request_id="through-the-ensemble")
                assert not stopped.error
                stream.collect()
    wait_cancelled(llm_server, before)


def test_a_deadline_passes(llm_server: LlmServer) -> None:
    """What was made until then has been sent; the end says why."""
    inputs = {"text_input": PROMPT, "stream": True, "timeout_ms": 800, "return_finish_reason": True}
    answer = grpc_infer(llm_server.grpc_url, "llm", inputs, parameters=LONG)
    assert (answer.error, answer.last("finish_reason")) == ("", b"timeout")
    assert answer.text and len(answer.responses) < LONG["max_tokens"]


# ---------------------------------------------------------------- bad bytes


def test_nobody_can_connect_to_the_socket_of_an_engine_that_runs(llm_server: LlmServer) -> None:
    """What strangers send before the engine has connected: tests/triton/test_backend_faults.py."""
    engines = llm_server.engines()
    assert engines
    for engine in engines:
        command = engine.cmdline()
        name = command[command.index("--socket") + 1]
        with socket.socket(socket.AF_UNIX) as intruder, pytest.raises(ConnectionRefusedError):
            intruder.connect("\0" + name.removeprefix("@"))


def test_invalid_utf8(llm_server: LlmServer) -> None:
    answer = grpc_infer(llm_server.grpc_url, "llm", {"text_input": np.array([b"\xff\xfe\x80"], dtype=np.object_)})
    assert "text_input" in answer.error and "UTF-8" in answer.error


def test_an_empty_prompt(llm_server: LlmServer) -> None:
    status, reply = http_generate(llm_server.http_url, "llm", {"text_input": ""})
    assert status == 400 and "text_input" in reply["error"]
    answer = grpc_infer(llm_server.grpc_url, "llm", {"input_ids": np.zeros(0, np.int32)})
    assert "input_ids" in answer.error


def test_an_over_long_prompt(llm_server: LlmServer) -> None:
    status, reply = http_generate(llm_server.http_url, "llm", {"text_input": "import os\n" * 20000})
    assert status == 400
    assert "tokens" in reply["error"], reply


def test_token_ids_outside_the_vocabulary(llm_server: LlmServer) -> None:
    answer = grpc_infer(llm_server.grpc_url, "llm", {"input_ids": [5, 10_000_000]})
    assert "input_ids" in answer.error or "prompt" in answer.error


def test_broken_http(llm_server: LlmServer) -> None:
    connection = http.client.HTTPConnection(llm_server.http_url, timeout=PATIENCE_S)
    connection.request("POST", "/v2/models/llm/generate", b'{"text_input": "abc"')
    assert connection.getresponse().status >= 400
    connection.close()


# ---------------------------------------------------------------- too much


def test_three_hundred_concurrent_streams(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """Over HTTP, where Triton loses events of a backend that sends in bursts: each stream must be whole."""
    bodies: list[dict[str, object]] = [
        {"text_input": f"def function_{index % 30}(a, b):\n", "stream": True, **SHORT} for index in range(300)
    ]
    streams = stream_many(llm_server.http_url, "llm", bodies, timeout_s=120)
    incomplete = [stream for stream in streams if not stream.is_complete or stream.errors()]
    assert not incomplete, f"{len(incomplete)} streams, the first: {incomplete[0]}"
    texts = ["".join(stream.texts()) for stream in streams]
    for index in range(30):
        assert len(set(texts[index::30])) == 1, "the same prompt, another text"


def test_three_hundred_concurrent_requests_over_grpc(llm_server: LlmServer) -> None:
    num_streams, num_requests = 10, 30
    streams = [grpc_stream(llm_server.grpc_url) for _ in range(num_streams)]
    opened = [stream.__enter__() for stream in streams]
    try:
        for index in range(num_streams * num_requests):
            inputs = {"text_input": f"x_{index} = ", "stream": True}
            opened[index % num_streams].send("llm", inputs, parameters=SHORT, request_id=str(index))
        for stream in opened:
            finals = 0
            while finals < num_requests:
                _, is_final, error = stream.receive(timeout_s=120)
                assert not error
                finals += is_final
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)


def test_out_of_blocks(llm_server: LlmServer, greedy: Callable[..., str]) -> None:
    """A pool for two sequences, six requests: preemption lets all end, with the text that each would have alone."""
    tiny = {"block_size": 16, "num_blocks": 8, "max_model_len": 64, "enable_prefix_caching": "false"}
    prompts = [f"def function_{index}(a, b):\n" for index in range(6)]
    with llm_server.variant("tiny_pool", tiny) as model:
        bodies: list[dict[str, object]] = [
            {"text_input": prompt, "stream": True, "max_tokens": 36, "temperature": 0.0} for prompt in prompts
        ]
        streams = stream_many(llm_server.http_url, model, bodies, timeout_s=120)
        assert ["".join(stream.texts()) for stream in streams] == [greedy(prompt, 36) for prompt in prompts]
        llm_server.wait_idle(model)
        assert llm_server.metric("slipstream_preemptions_total", model) > 0
        status, reply = http_generate(llm_server.http_url, model, {"text_input": prompts[0] * 20})
        assert status == 400 and "64" in reply["error"], reply


def test_too_many_waiting_requests_are_turned_away(llm_server: LlmServer) -> None:
    with llm_server.variant("small_queue", {"max_num_seqs": 1, "max_waiting_requests": 2}) as model:
        asked = {"text_input": PROMPT, "stream": True, **SHORT, "max_tokens": 100}  # long beside the time to send all
        streams = stream_many(llm_server.http_url, model, [dict(asked) for _ in range(24)], timeout_s=120)
        served = [stream for stream in streams if stream.texts()]
        refused = [stream for stream in streams if stream.errors()]
        assert len(served) + len(refused) == 24 and len(served) >= 1 and refused
        assert "waiting" in refused[0].errors()[0]
        llm_server.wait_idle(model)


# ---------------------------------------------------------------- a broken checkpoint


@pytest.mark.parametrize("damage", ["truncated", "no tensor", "no config", "unknown family"])
def test_a_broken_checkpoint_says_what_is_wrong(llm_server: LlmServer, tmp_path: Path, damage: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(llm_server.checkpoint, checkpoint)
    named = break_checkpoint(checkpoint, damage)
    llm_server.add_variant("broken", {}, checkpoint)
    status, body = llm_server.load("broken")
    assert status == 400
    assert named in body.decode()
    assert not llm_server.is_model_ready("broken")
    shutil.rmtree(llm_server.repository / "broken")


def break_checkpoint(folder: Path, damage: str) -> str:
    """Returns what the load's error must name."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
        return "model.safetensors"
    if damage == "no tensor":
        data = weights.read_bytes()
        weights.write_bytes(data.replace(b'"model.norm.weight"', b'"model.norm.wEIght"', 1))
        return "model.norm"
    if damage == "no config":
        config.unlink()
        return "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "model_type": "frogmouth", "architectures": ["FrogmouthForCausalLM"]}))
    return "Frogmouth"


def test_a_wrong_parameter_fails_the_load_by_name(llm_server: LlmServer) -> None:
    for parameters, named in (
        ({"max_num_sequences": 4}, "max_num_sequences"),
        ({"dtype": "${dtype}"}, "dtype"),
        ({"num_blocks": 1, "block_size": 16, "max_model_len": 512}, "512"),
    ):
        llm_server.add_variant("misconfigured", parameters)
        status, body = llm_server.load("misconfigured")
        assert status == 400 and named in body.decode(), body
    shutil.rmtree(llm_server.repository / "misconfigured")
