"""The end of the server: it comes, whatever clients and engines do, and everybody is answered before it gives up.

Server 2.51 by itself waits --exit-timeout-secs for a model that a gRPC stream still refers to, and without limit for
clients to close their streams; with requests that outlive the time-out it crashes or hangs in its own teardown.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from fake_backend import add_ensemble, add_model
from grpc_stream import GrpcStream
from llm_client import grpc_stream
from llm_server import missing_server
from patience import PATIENCE_S, wait_until
from processes import is_alive, only_child
from triton_server import HOST, TritonServer, fetch, free_ports

EXIT_TIMEOUT_S = 10  # of TritonServer


def server_with(fake_backend_dir: Path, tmp_path: Path, parameters: dict[str, str], **options: object) -> TritonServer:
    add_model(tmp_path / "repository", "llm", {"step_ms": "5", **parameters})
    return TritonServer(tmp_path / "repository", fake_backend_dir, **options)  # type: ignore[arg-type]


def wait_end(server: TritonServer, timeout_s: float) -> int:
    """The exit status of a server that was told to end."""
    assert server.process is not None
    return server.process.wait(timeout_s)


@pytest.mark.parametrize(
    "script", [None, {"tokens": 3}, {"tokens": 1, "then": "error"}], ids=["unused", "ended", "failed"]
)
def test_a_grpc_stream_that_stays_open_does_not_keep_the_server(
    fake_backend_dir: Path, tmp_path: Path, script: dict[str, object] | None
) -> None:
    with server_with(fake_backend_dir, tmp_path, {}) as server, GrpcStream(server.grpc_url) as stream:
        engine = only_child(server.pid)
        if script is not None:
            stream.send("llm", script)
            stream.wait(num_ends=1)
        os.kill(server.pid, signal.SIGTERM)
        assert wait_end(server, EXIT_TIMEOUT_S) == 0
        wait_until(lambda: not is_alive(engine), "the engine to end")


def test_a_cancel_that_meets_the_last_token_does_not_keep_the_server(fake_backend_dir: Path, tmp_path: Path) -> None:
    """A delay of the server's own, made for testing, has each response wait 0.5 s before it is written."""
    slow_writes = {"TRITONSERVER_DELAY_GRPC_RESPONSE": "500"}
    with server_with(
        fake_backend_dir, tmp_path, {}, env=slow_writes, control_mode="explicit", load_models=["llm"]
    ) as server:
        for _ in range(3):
            stream = GrpcStream(server.grpc_url).__enter__()
            stream.send("llm", {"tokens": 1})
            time.sleep(0.25)
            stream.cancel()
        time.sleep(1)
        os.kill(server.pid, signal.SIGTERM)
        assert wait_end(server, EXIT_TIMEOUT_S) == 0


def test_everybody_is_answered_before_the_server_gives_up(fake_backend_dir: Path, tmp_path: Path) -> None:
    """drain_timeout_s is 60 here: the server's own limit is less, so it counts."""
    with server_with(fake_backend_dir, tmp_path, {}) as server, GrpcStream(server.grpc_url) as stream:
        assert "--exit-timeout-secs is 10, so that requests have 5 s when it exits, not the 60 s of" in server.log
        engine = only_child(server.pid)
        stream.send("llm", {"tokens": 1, "then": "hang"})
        stream.wait(num_texts=1)
        os.kill(server.pid, signal.SIGTERM)
        stream.wait(num_ends=1, timeout_s=EXIT_TIMEOUT_S)
        assert stream.errors == [
            "the server is shutting down and the request did not end within drain_timeout_s [UNAVAILABLE]"
        ]
        # the stream stays open, so that the server never unloads the model: the engine must go all the same
        wait_until(lambda: not is_alive(engine), "the engine to end", timeout_s=EXIT_TIMEOUT_S)
        assert wait_end(server, 2 * EXIT_TIMEOUT_S) == 0
        assert "failed to stop server" not in server.log


@pytest.mark.parametrize("script", [{"tokens": 100000}, {"tokens": 1, "then": "hang"}], ids=["decodes", "waits"])
def test_an_ensemble_is_answered_when_the_server_exits(
    fake_backend_dir: Path, tmp_path: Path, script: dict[str, object]
) -> None:
    """The server refuses the steps of an ensemble from then on, and an ensemble of which it refused one is silent."""
    inputs = 'input { name: "max_tokens" data_type: TYPE_INT32 dims: [1] }\n'
    inputs += 'input { name: "REQUEST_HANDLE" data_type: TYPE_UINT64 dims: [1] }\n'
    add_model(tmp_path / "repository", "detok", {"task": "detokenize"}, inputs)
    add_ensemble(tmp_path / "repository", "llm", "num_output_tokens", "max_tokens")
    with (
        server_with(fake_backend_dir, tmp_path, {}) as server,
        GrpcStream(server.grpc_url) as stream,
        GrpcStream(server.grpc_url) as alone,
    ):
        alone.send("llm", {"tokens": 300})
        stream.send("ensemble", script)
        stream.wait(num_texts=1)
        os.kill(server.pid, signal.SIGTERM)
        stream.wait(num_ends=1)
        assert stream.errors == [
            "in ensemble 'ensemble', the server is shutting down, and its ensembles cannot go on [UNAVAILABLE]"
        ]
        alone.wait(num_ends=1)
        assert (len(alone.texts), alone.errors) == (300, []), "who asks the model itself is drained"
        server.wait_until(lambda: "cancelled after" in server.log, "the engine to be told")
        assert wait_end(server, EXIT_TIMEOUT_S) == 0


def test_an_engine_that_dies_while_the_server_exits_says_so_and_stays_down(
    fake_backend_dir: Path, tmp_path: Path
) -> None:
    with server_with(fake_backend_dir, tmp_path, {}) as server, GrpcStream(server.grpc_url) as stream:
        stream.send("llm", {"tokens": 100000})
        stream.wait(num_texts=1)
        os.kill(server.pid, signal.SIGTERM)
        server.wait_until(lambda: "Waiting for in-flight requests" in server.log, "the server to exit")
        only_child(server.pid).kill()
        stream.wait(num_ends=1, timeout_s=EXIT_TIMEOUT_S)
        assert stream.errors == [
            "the engine of model 'llm' was killed by signal 9 (Killed); the server is shutting down [UNAVAILABLE]"
        ]
        assert wait_end(server, EXIT_TIMEOUT_S) == 0
        assert server.log.count("the engine of model 'llm' is up") == 1


def test_a_second_ctrl_c_ends_at_once_with_a_reason(demo_model: Path) -> None:
    if missing_server():
        pytest.skip(missing_server())
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3)))
    command = [sys.executable, "-m", "slipstream.cli", "serve", "--model", str(demo_model)]
    command += [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        ready = f"http://{HOST}:{ports['http']}/v2/health/ready"
        wait_until(lambda: fetch(urllib.request.Request(ready))[0] == 200, "the server to be ready", 2 * PATIENCE_S)
        with grpc_stream(f"{HOST}:{ports['grpc']}") as stream:
            sampling = {"max_tokens": 2000, "temperature": 0.0, "ignore_eos": True}
            for _ in range(16):  # so that the answers take longer than the test
                stream.send("llm", {"text_input": "import os\n", "stream": True}, parameters=sampling)
            assert not stream.receive()[2]
            os.killpg(server.pid, signal.SIGINT)
            time.sleep(1)
            assert server.poll() is None, "it drains"
            os.killpg(server.pid, signal.SIGINT)
            server.wait(10)
            errors = []
            while not stream.answers.empty():
                errors.append(stream.receive()[2])
        assert any("; the server is shutting down" in error for error in errors), errors[-1]
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        output, _ = server.communicate()
    assert "--exit-timeout-secs=70" in output and "Ctrl-C again ends at once" in output
