"""Models that server 2.51 holds after their unload: an open gRPC stream does so, and a lost cancel does it for good."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_backend import add_model
from grpc_stream import GrpcStream
from patience import wait_until
from processes import pids_of, thread_names
from triton_server import TritonServer

UP = 'slipstream_engine_up{model="llm",version="1"}'


@pytest.fixture(scope="module")
def server(fake_backend_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    add_model(repository, "llm", {"step_ms": "20", "drain_timeout_s": "1"})
    with TritonServer(repository, fake_backend_dir, control_mode="explicit") as started:
        yield started


@pytest.fixture
def loaded(server: TritonServer) -> TritonServer:
    """With one engine."""
    wait_until(lambda: not engines(server), "the engines of other tests to end")
    assert server.load("llm")[0] == 200
    return server


def engines(server: TritonServer) -> set[int]:
    return pids_of(server.pid)


def own_threads(server: TritonServer) -> Counter[str]:
    """The threads that the backend has for its engines, by name."""
    names = thread_names(server.pid)
    of_server = {"slip-reloader", "slip-exit"}
    return Counter(name for name in names if name.startswith("slip-") and name not in of_server)


def ask(server: TritonServer, stream: GrpcStream) -> None:
    num_before = stream.num_finals
    stream.send("llm", "hello")
    stream.wait(num_ends=num_before + 1)
    assert not stream.errors


def test_the_engine_of_an_unloaded_model_ends_though_the_server_holds_it(loaded: TritonServer) -> None:
    with GrpcStream(loaded.grpc_url) as stream:
        ask(loaded, stream)  # the first request of a stream keeps its model until the stream is closed
        assert loaded.unload("llm")[0] == 200
        wait_until(lambda: not engines(loaded), "the engine to end")
        assert "its engine is ended and gives its memory back" in loaded.log
        wait_until(lambda: UP not in loaded.metrics(), "its metrics to go: an unloaded model is not down")
        assert loaded.load("llm")[0] == 200
        with GrpcStream(loaded.grpc_url) as other:
            ask(loaded, other)
        assert loaded.metrics()[UP] == 1
    loaded.wait_model_ready("llm")
    assert loaded.unload("llm")[0] == 200


def test_so_does_that_of_a_model_that_was_loaded_anew(loaded: TritonServer) -> None:
    with GrpcStream(loaded.grpc_url) as stream:
        ask(loaded, stream)
        [held] = engines(loaded)
        assert loaded.unload("llm")[0] == 200 and loaded.load("llm")[0] == 200
        with GrpcStream(loaded.grpc_url) as other:
            ask(loaded, other)
            wait_until(lambda: held not in engines(loaded), "the engine that nobody can ask any more")
            wait_until(lambda: len(engines(loaded)) == 1, "one engine to be left")
            ask(loaded, other)
    assert loaded.unload("llm")[0] == 200


def test_an_unloaded_model_finishes_what_it_has_begun(loaded: TritonServer) -> None:
    """Three seconds of text, where an idle engine would end after one."""
    with GrpcStream(loaded.grpc_url) as stream:
        stream.send("llm", {"tokens": 150})
        stream.wait(num_texts=2)
        assert loaded.unload("llm")[0] == 200
        stream.wait(num_ends=1)
        assert len(stream.texts) == 150 and not stream.errors
        wait_until(lambda: not engines(loaded), "the engine to end")


def test_an_instance_whose_engine_died_keeps_no_threads_while_the_server_holds_it(loaded: TritonServer) -> None:
    """Another instance has replaced it; after lost cancels the server holds such instances for good."""
    with GrpcStream(loaded.grpc_url) as stream:
        ask(loaded, stream)
        wait_until(lambda: own_threads(loaded).total() == 3, "the threads of one engine")
        before = own_threads(loaded)
        [engine] = engines(loaded)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: engines(loaded) - {engine}, "another engine")
        loaded.wait_model_ready("llm")
        wait_until(lambda: own_threads(loaded) == before, "the threads of the dead engine's instance to end")
    assert loaded.unload("llm")[0] == 200
    wait_until(lambda: not own_threads(loaded), "its threads to end")
