"""The C++ backend when its engine dies, lies or does not start: all requests are answered, the engine comes back."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_backend import add_model
from grpc_stream import GrpcStream
from patience import wait_until
from processes import only_child, pids_of, wait_gone
from sse_client import stream_many
from triton_server import TritonServer

RESTARTS = 'slipstream_engine_restarts_total{model="llm",version="1"}'
UP = 'slipstream_engine_up{model="llm",version="1"}'
RUNNING = 'slipstream_fake_running{model="llm",state="running",version="1"}'


def engine_pid(server: TritonServer) -> int:
    """The engine process of a server that has one model loaded."""
    return only_child(server.pid).pid


def connect_to_engine_socket(pid: int) -> None:
    """As a stranger would, who reads the name from the engine's command line."""
    command = psutil.Process(pid).cmdline()
    name = command[command.index("--socket") + 1]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + name.removeprefix("@"))


# ---------------------------------------------------------------- a running engine fails (control mode none)


@pytest.fixture(scope="module")
def server(fake_backend_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    add_model(repository, "llm", {"step_ms": "2", "worker": "true", "slow_file": str(repository / "slow")})
    with TritonServer(repository, fake_backend_dir, env={"FAKE_ENGINE_STRAYS": "1"}) as started:
        yield started


@pytest.fixture
def healthy(server: TritonServer) -> TritonServer:
    server.wait_until(lambda: server.metrics()[UP] == 1, "the engine to be up")
    return server


@pytest.fixture
def stays_down(healthy: TritonServer) -> Iterator[TritonServer]:
    """A healthy server whose engine, once it has died, does not come back before the test ends."""
    flag = healthy.repository / "slow"
    flag.touch()
    yield healthy
    flag.unlink()


def test_strangers_on_the_socket_are_turned_away(healthy: TritonServer) -> None:
    # FAKE_ENGINE_STRAYS: before its own hello the engine sends HTTP, 3 bytes, a wrong token, garbage, and silence.
    assert healthy.log.count("that did not say hello as the engine") >= 4
    if os.geteuid() == 0:  # else there is nobody whom the engine could play
        assert "of another user" in healthy.log
    with pytest.raises(ConnectionRefusedError):  # and with the engine connected nobody can even try
        connect_to_engine_socket(engine_pid(healthy))


def test_sigkill_in_mid_stream_and_text_flows_again(healthy: TritonServer) -> None:
    engine = psutil.Process(engine_pid(healthy))
    worker = only_child(engine.pid)
    with GrpcStream(healthy.grpc_url) as stream:
        stream.send("llm", {"tokens": 100000})
        stream.wait(num_texts=5)
        engine.kill()
        stream.wait(num_ends=1)
        assert len(stream.errors) == 1
        wait_gone(worker.pid)
        wait_until(lambda: not engine.is_running(), "the engine to end and leave no zombie")
        healthy.wait_until(lambda: healthy.metrics()[UP] == 1, "the engine to be up")
        stream.send("llm", "back again")
        stream.wait(num_texts=len(stream.texts) + 2)
    assert stream.texts[-2:] == [" back", " again"]


@pytest.mark.parametrize("fault", ["crash", "garbage"])
def test_every_stream_is_answered_when_the_engine_fails(stays_down: TritonServer, fault: str) -> None:
    healthy, before = stays_down, stays_down.metrics()[RESTARTS]
    with GrpcStream(healthy.grpc_url) as stream:
        for _ in range(8):
            stream.send("llm", {"tokens": 100000})
        stream.wait(num_texts=20)
        stream.send("llm", {"tokens": 1})  # at its end the engine reports the others as running
        healthy.wait_until(lambda: healthy.metrics()[RUNNING] == 8, "8 running requests")
        stream.send("llm", {"tokens": 3, "then": fault})
        stream.wait(num_ends=10)
        assert len(stream.errors) == 9
        assert all(error.startswith("the engine of model 'llm' ") for error in stream.errors)
        assert all(error.endswith("; it is being restarted [UNAVAILABLE]") for error in stream.errors)
        stream.send("llm", "while it is down")
        stream.wait(num_ends=11)
        assert "is being restarted" in stream.errors[-1], "not kept for the next engine"
    samples = healthy.metrics()
    assert samples[UP] == 0 and samples[RESTARTS] == before + 1
    assert samples[RUNNING] == 0, "a gauge stays frozen while the engine is down"
    assert healthy.is_model_ready("llm")  # server 2.51 in this control mode cannot say otherwise: see the README there


def test_the_client_learns_how_the_engine_died(stays_down: TritonServer) -> None:
    healthy = stays_down
    body = {"text_input": json.dumps({"tokens": 2, "then": "crash"})}
    [stream] = stream_many(healthy.http_url, "llm", [body])
    assert len(stream.texts()) == 2 and stream.is_complete
    [error] = stream.errors()
    # its output may hold paths, stale lines and other clients' values: that is for the log alone
    assert error == "the engine of model 'llm' was killed by signal 9 (Killed); it is being restarted [UNAVAILABLE]"
    healthy.wait_until(lambda: "serving llm version 1" in healthy.log.rpartition("its last lines:")[2], "the log")
    status, reply = healthy.post("/v2/models/llm/generate", {"text_input": "x"})
    assert status >= 400 and b"is being restarted" in reply  # 400 on server 2.51, whatever the error code


# ---------------------------------------------------------------- an engine that does not start


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for fault in ("fail", "die", "garbage"):
        add_model(folder, fault, {"load": fault})
    add_model(folder, "many", {}, "instance_group { count: 65 kind: KIND_CPU }\n")
    add_model(folder, "juggle", {"task": "juggle"})
    add_model(folder, "patient", {"drain_timeout_s": "1_0"})
    add_model(folder, "slack", {"replica_load_slack": "4x"})
    unfilled = {"max_num_seqs": "${max_num_seqs}", "max_queue_size": "${max_queue_size}"}
    add_model(folder, "unfilled", {**unfilled, "load": "fail"})
    add_model(folder, "llm", {"step_ms": "5", "fail_file": str(folder / "fails")})
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(
        """platform: "ensemble"
        input { name: "text_input" data_type: TYPE_STRING dims: [1] }
        output { name: "text_output" data_type: TYPE_STRING dims: [1] }
        ensemble_scheduling { step { model_name: "llm" model_version: -1
          input_map { key: "text_input" value: "text_input" }
          output_map { key: "text_output" value: "text_output" } } }"""
    )
    return folder


@pytest.fixture(scope="module")
def explicit(fake_backend_dir: Path, repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, fake_backend_dir, control_mode="explicit") as started:
        yield started


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("fail", "model.safetensors: tensor 'lm_head.weight' is missing"),
        ("die", "killed by signal 9 (Killed); its last lines:\\n  I serving die"),
        ("die", "the last words of the engine"),
        ("garbage", "unknown frame type 99"),
        ("many", "instance_group: got a count of 65, accepted: at most 64 engines in all"),
        ("juggle", "unknown task 'juggle'"),
        ("patient", "drain_timeout_s='1_0': accepted: a number >= 0"),
        ("slack", "replica_load_slack='4x': accepted: an integer from 0 to 1000000"),
        ("unfilled", "tensor 'lm_head.weight' is missing"),  # the engine's words, as it says what a placeholder is
    ],
)
def test_the_load_fails_with_the_reason(explicit: TritonServer, model: str, text: str) -> None:
    others = pids_of(explicit.pid)
    status, body = explicit.load(model)
    assert status == 400 and text in body.decode(), body
    assert explicit.get(f"/v2/models/{model}/ready")[0] == 400
    wait_until(lambda: pids_of(explicit.pid) <= others, "the engine to end")


# ---------------------------------------------------------------- readiness, unload, shutdown (explicit mode)


@pytest.fixture
def loaded(explicit: TritonServer) -> TritonServer:
    assert explicit.load("ensemble")[0] == 200  # loads llm as well
    return explicit


def crash(server: TritonServer) -> None:
    [stream] = stream_many(server.http_url, "llm", [{"text_input": json.dumps({"tokens": 1, "then": "crash"})}])
    assert stream.errors()


def test_ready_is_false_while_the_engine_is_down_and_dependents_come_back(
    loaded: TritonServer, repository: Path
) -> None:
    before = loaded.metrics()[RESTARTS]
    flag = repository / "fails"
    flag.touch()
    crash(loaded)
    loaded.wait_until(lambda: not loaded.is_model_ready("llm"), "llm not to be ready")
    loaded.wait_until(lambda: not loaded.is_model_ready("ensemble"), "the ensemble not to be ready")
    loaded.wait_until(lambda: "could not be loaded again, next try" in loaded.log, "a failed restart")
    samples = loaded.metrics()
    assert samples[UP] == 0 and samples[RESTARTS] == before + 1  # the metrics outlive the unloaded model
    status, _ = loaded.post("/v2/models/llm/generate", {"text_input": "x"})
    assert status in (400, 404, 503)
    flag.unlink()
    loaded.wait_model_ready("llm")
    loaded.wait_model_ready("ensemble")
    [stream] = stream_many(loaded.http_url, "ensemble", [{"text_input": "well again"}])
    assert stream.texts() == [" well", " again"]
    assert loaded.metrics()[UP] == 1


def test_a_model_whose_folder_is_gone_is_not_loaded_again(explicit: TritonServer, repository: Path) -> None:
    others = pids_of(explicit.pid)
    add_model(repository, "gone", {})
    assert explicit.load("gone")[0] == 200
    [engine] = pids_of(explicit.pid) - others
    (repository / "gone").rename(repository.parent / "moved-away")
    os.kill(engine, signal.SIGKILL)
    explicit.wait_until(lambda: not explicit.is_model_ready("gone"), "the model to be unloaded")
    explicit.wait_until(lambda: "model gone is not in the repository any more" in explicit.log, "the end of trying")
    explicit.wait_until(lambda: UP.replace("llm", "gone") not in explicit.metrics(), "its metrics to be gone")


def test_an_engine_that_dies_while_it_drains_is_not_said_to_be_terminated(
    explicit: TritonServer, repository: Path
) -> None:
    add_model(repository, "mortal", {"drain": "die"})
    assert explicit.load("mortal")[0] == 200
    assert explicit.unload("mortal")[0] == 200
    explicit.wait_until(lambda: "successfully unloaded 'mortal'" in explicit.log, "the model to be unloaded")
    assert "the engine of model 'mortal' did not drain" not in explicit.log


def test_unload_lets_streams_finish_and_takes_the_metrics_away(loaded: TritonServer) -> None:
    pid = engine_pid(loaded)  # of the one model that is loaded
    with GrpcStream(loaded.grpc_url) as stream:
        stream.send("llm", {"tokens": 100})
        stream.wait(num_texts=5)
        assert loaded.unload("ensemble")[0] == 200 and loaded.unload("llm")[0] == 200
        loaded.wait_until(lambda: not loaded.is_model_ready("llm"), "the model to be unloaded")
        stream.wait(num_ends=1)
        assert len(stream.texts) == 100 and not stream.errors
    wait_gone(pid)
    loaded.wait_until(lambda: UP not in loaded.metrics(), "the metrics to be gone")
    assert "did not drain in time" not in loaded.log


# ---------------------------------------------------------------- the server ends


def small_server(
    fake_backend_dir: Path, tmp_path: Path, parameters: dict[str, str] | None = None, **options: object
) -> TritonServer:
    own = {"step_ms": "5", "slow_file": str(tmp_path / "slow"), **(parameters or {})}
    add_model(tmp_path / "repository", "llm", own)
    return TritonServer(tmp_path / "repository", fake_backend_dir, env={"TMPDIR": str(tmp_path)}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("parameters", [{}, {"drain_timeout_s": ""}, {"task": ""}])  # empty: absent
def test_sigterm_in_mid_stream_finishes_the_stream(
    fake_backend_dir: Path, tmp_path: Path, parameters: dict[str, str]
) -> None:
    with small_server(fake_backend_dir, tmp_path, parameters) as server:
        pid = engine_pid(server)
        with GrpcStream(server.grpc_url) as stream:
            stream.send("llm", {"tokens": 200})
            stream.wait(num_texts=5)
            os.kill(server.pid, signal.SIGTERM)
            stream.wait(num_ends=1)
        assert len(stream.texts) == 200 and not stream.errors
        server.stop()
        assert "did not drain in time" not in server.log
        wait_gone(pid)


def test_sigterm_answers_what_does_not_end_within_the_drain_timeout(fake_backend_dir: Path, tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "hung", {"drain_timeout_s": "0.5"})
    with small_server(fake_backend_dir, tmp_path) as server:
        engines = pids_of(server.pid)
        assert len(engines) == 2
        with GrpcStream(server.grpc_url) as stream:
            stream.send("llm", {"tokens": 100})  # has the default of 60 s, and needs half a second
            stream.send("hung", {"tokens": 1, "then": "hang"})
            stream.wait(num_texts=10)
            os.kill(server.pid, signal.SIGTERM)
            stream.wait(num_ends=2)
        assert len(stream.texts) == 101
        assert stream.errors == [
            "the server is shutting down and the request did not end within drain_timeout_s [UNAVAILABLE]"
        ]
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 10, "a hung engine must not outlast the server's exit time-out"
        assert "exit timeout expired" not in server.log.lower()
        assert server.log.count("did not drain in time; terminating it") == 1
        wait_gone(*engines)


def test_no_orphan_is_left_when_the_server_is_killed(fake_backend_dir: Path, tmp_path: Path) -> None:
    with small_server(fake_backend_dir, tmp_path) as server:
        pid = engine_pid(server)
        os.kill(server.pid, signal.SIGKILL)
        wait_gone(pid)


def test_a_server_killed_before_its_engine_connects_leaves_nothing(fake_backend_dir: Path, tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path / "tmp"), "FAKE_ENGINE_SLEEP_S": "600"}
    (tmp_path / "tmp").mkdir()
    add_model(tmp_path / "repository", "llm", {})
    with TritonServer(tmp_path / "repository", fake_backend_dir, control_mode="explicit", env=environment) as server:
        threading.Thread(target=server.load, args=("llm",), daemon=True).start()
        pid = engine_pid(server)
        os.kill(server.pid, signal.SIGKILL)
        wait_gone(pid)
        assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("mode", ["none", "explicit"])
@pytest.mark.parametrize("is_loading", [False, True], ids=["in_back_off", "loading_slowly"])
def test_sigterm_while_the_engine_restarts_ends_the_server(
    fake_backend_dir: Path, tmp_path: Path, mode: str, is_loading: bool
) -> None:
    with small_server(fake_backend_dir, tmp_path, control_mode=mode) as server:
        if mode == "explicit":
            assert server.load("llm")[0] == 200
        if is_loading:
            (tmp_path / "slow").touch()
        crash(server)
        if is_loading:
            server.wait_until(lambda: server.log.count("serving llm version 1") == 2, "the second start")
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 10, "before the server's exit time-out"
