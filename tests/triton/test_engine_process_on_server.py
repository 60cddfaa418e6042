"""The engine as a child of the server: how it is waited for, what it imports, and when it does not read its socket."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_backend import add_model
from grpc_stream import GrpcStream
from llm_server import ROOT, missing_server
from patience import wait_until
from processes import children_of
from slipstream.commands import serve
from triton_server import TritonServer

MIB = 1 << 20


def engine_of(server: TritonServer, model: str) -> psutil.Process:
    """By the order in which the models were loaded: each has one engine."""
    return children_of(server.pid)[["stopped", "other"].index(model)]


# ---------------------------------------------------------------- SIGCHLD


@pytest.fixture
def ignored_children() -> Iterator[None]:
    """Child processes of this test inherit that SIGCHLD is ignored, as from a parent that does not wait for its own."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_load_whose_engine_dies_fails_though_the_server_ignores_sigchld(
    fake_backend_dir: Path, tmp_path: Path, ignored_children: None
) -> None:
    add_model(tmp_path, "dies", {"load": "die"})
    with TritonServer(tmp_path, fake_backend_dir, control_mode="explicit") as server:
        status, body = server.load("dies")
        assert status == 400 and "was killed by signal 9 (Killed)" in body.decode(), body


# ---------------------------------------------------------------- where the engine imports from


def test_the_engine_imports_nothing_from_the_current_directory(tmp_path: Path) -> None:
    if missing_server():
        pytest.skip(missing_server())
    for name in ("slipstream/__init__", "torch", "json", "logging", "sitecustomize"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"open({os.fspath(tmp_path / 'was-run')!r}, 'a').write({name!r})\n")
    launcher = ROOT / "install/backends/slipstream/slipstream-engine"
    done = subprocess.run([launcher, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--socket" in done.stdout, done.stderr
    assert not (tmp_path / "was-run").exists(), (tmp_path / "was-run").read_text()


def test_the_gateway_of_serve_imports_nothing_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('imported from the current directory')\n")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    command = serve.gateway_command(ROOT / "model_repository", parser.parse_args(["--openai-port", "9000"]))
    program = command[: command.index("serve-openai")]
    assert program[0] == sys.executable
    done = subprocess.run([*program, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("slipstream "), done.stderr


# ---------------------------------------------------------------- an engine that does not read its socket


def test_an_engine_that_does_not_read_costs_nobody_else_anything(fake_backend_dir: Path, tmp_path: Path) -> None:
    """Its own further requests are refused at once, not after a time-out that ends it; the others come later, whole."""
    for name in ("stopped", "other"):
        add_model(tmp_path, name, {})
    with TritonServer(tmp_path, fake_backend_dir, control_mode="explicit") as server:
        for name in ("stopped", "other"):
            assert server.load(name)[0] == 200
        engine = engine_of(server, "stopped")
        with GrpcStream(server.grpc_url) as stream, GrpcStream(server.grpc_url) as other:
            stream.send("stopped", "x" * 24)
            stream.wait(num_ends=1)
            engine.suspend()
            started = time.monotonic()
            word = "y" * (10 * MIB)
            for _ in range(12):
                stream.send("stopped", word)
            stream.wait(num_ends=2, timeout_s=25)
            assert "does not keep up with its requests: more than 64 MiB of them are unread" in stream.errors[0]
            other.send("other", "a b c")
            other.wait(num_ends=1, timeout_s=10)
            assert other.texts == [" a", " b", " c"]
            assert time.monotonic() - started < 25, "before the 30 s after which it used to be killed"
            engine.resume()
            stream.wait(num_ends=13)
            assert {len(text) for text in stream.texts[1:]} == {len(word) + 1}
            assert len(stream.errors) + len(stream.texts) == 13
        assert server.metrics()['slipstream_engine_restarts_total{model="stopped",version="1"}'] == 0


def test_a_flood_is_refused_before_the_engine_has_read_it(fake_backend_dir: Path, tmp_path: Path) -> None:
    """64 MiB of small requests took it minutes to refuse, and all that came behind them waited."""
    add_model(tmp_path, "flooded", {"max_num_seqs": "2", "max_queue_size": "3"})
    with TritonServer(tmp_path, fake_backend_dir, control_mode="explicit") as server:
        assert server.load("flooded")[0] == 200
        [engine] = children_of(server.pid)
        with GrpcStream(server.grpc_url) as stream:
            stream.send("flooded", "x")
            stream.wait(num_ends=1)
            engine.suspend()
            most, num_more = 2 + 2 * 3 + 1024, 40
            for _ in range(most + num_more):
                stream.send("flooded", "x")
            stream.wait(num_ends=1 + num_more, timeout_s=25)
            assert len(stream.errors) == num_more
            told = f"{most} requests of the model are not answered yet, accepted: no more, by max_num_seqs"
            assert all(told in error and error.endswith("[UNAVAILABLE]") for error in stream.errors), stream.errors[0]
            engine.resume()
            stream.wait(num_ends=1 + most + num_more)
            assert len(stream.errors) == num_more
            stream.send("flooded", "x")
            stream.wait(num_ends=2 + most + num_more)
            assert len(stream.errors) == num_more, "there is room again"


# ---------------------------------------------------------------- honest readiness


def test_one_refused_unload_leaves_the_readiness_of_others_honest(fake_backend_dir: Path, tmp_path: Path) -> None:
    """A server that is still loading refuses to unload; it does not refuse later, or for another model."""
    slow = tmp_path / "slow"
    slow.touch()
    add_model(tmp_path / "repository", "dies_early", {"worker": "true"})
    add_model(tmp_path / "repository", "dies_later", {"slow_file": str(slow)})
    models = ("dies_early", "dies_later")
    server = TritonServer(tmp_path / "repository", fake_backend_dir, control_mode="explicit", load_models=models)

    def engine_of(has_worker: bool) -> psutil.Process:
        def found() -> list[psutil.Process]:
            return [one for one in children_of(server.pid) if bool(children_of(one.pid)) is has_worker]

        wait_until(lambda: len(found()) == 1, "one such engine")
        return found()[0]

    def kill_while_the_other_loads() -> None:
        try:
            wait_until(lambda: "the engine of model 'dies_early' is up" in server.log, "the first engine to be up")
            engine_of(has_worker=True).kill()
            wait_until(lambda: "restarts in place" in server.log, "the unload to be refused")
        finally:
            slow.unlink()

    killer = threading.Thread(target=kill_while_the_other_loads)
    killer.start()
    with server:
        killer.join()
        server.wait_until(lambda: server.log.count("the engine of model 'dies_early' is up") == 2, "the restart")
        slow.touch()
        engine_of(has_worker=False).kill()
        server.wait_until(lambda: not server.is_model_ready("dies_later"), "the model not to be ready")
        slow.unlink()
        server.wait_model_ready("dies_later")
