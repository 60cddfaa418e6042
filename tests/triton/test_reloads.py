"""Models that are unloaded and loaded again when their engine dies: which ones are, and which must not be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_backend import add_model
from grpc_stream import GrpcStream
from patience import wait_until
from processes import pids_of
from sse_client import stream_many
from triton_server import TritonServer

UP = 'slipstream_engine_up{model="llm",version="1"}'
RESTARTS = 'slipstream_engine_restarts_total{model="llm",version="1"}'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    add_model(folder, "llm", {"step_ms": "5"})
    versions = add_model(folder, "versions", {"step_ms": "5"}, "version_policy { all { } }\n")
    (versions / "2").mkdir()
    add_model(folder, "slow", {"slow_file": str(folder / "is_slow")})
    return folder


@pytest.fixture(scope="module")
def server(fake_backend_dir: Path, repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, fake_backend_dir, control_mode="explicit") as started:
        yield started


@pytest.fixture
def loaded(server: TritonServer) -> Iterator[TritonServer]:
    """With the model llm and its one engine."""
    wait_until(lambda: not pids_of(server.pid), "the engines of other tests to end")
    assert server.load("llm")[0] == 200
    yield server
    assert server.unload("llm")[0] == 200


def crash(server: TritonServer, model: str) -> None:
    [stream] = stream_many(server.http_url, model, [{"text_input": json.dumps({"tokens": 1, "then": "crash"})}])
    assert stream.errors()


@pytest.mark.parametrize("fault", ["crash", "garbage", "linger"])
def test_a_model_whose_engine_dies_after_its_unload_stays_unloaded(loaded: TritonServer, fault: str) -> None:
    num_loads = loaded.log.count("successfully loaded 'llm'")
    with GrpcStream(loaded.grpc_url) as stream:
        stream.send("llm", {"tokens": 100, "then": fault})
        stream.wait(num_texts=1)
        assert loaded.unload("llm")[0] == 200
        stream.wait(num_ends=1)
        assert len(stream.errors) == 1
    loaded.wait_until(lambda: UP not in loaded.metrics(), "the model to end")
    assert not loaded.is_model_ready("llm") and not pids_of(loaded.pid)
    assert loaded.log.count("successfully loaded 'llm'") == num_loads
    assert "model llm is unloaded until its engine works again" not in loaded.log


def test_an_engine_that_another_has_replaced_takes_nothing_away_when_it_dies(loaded: TritonServer) -> None:
    with GrpcStream(loaded.grpc_url) as stream:  # which keeps the model of its first request
        stream.send("llm", {"tokens": 1})
        stream.wait(num_ends=1)
        [held] = pids_of(loaded.pid)
        assert loaded.unload("llm")[0] == 200 and loaded.load("llm")[0] == 200
        before = loaded.metrics()[RESTARTS]
        num_deaths = loaded.log.count("was killed by signal 9")
        os.kill(held, signal.SIGKILL)
        loaded.wait_until(lambda: loaded.log.count("was killed by signal 9") > num_deaths, "its end to be seen")
        [serving] = pids_of(loaded.pid)
        for _ in range(20):  # a second, twice as long as a model is unloaded for
            stream.send("llm", {"tokens": 10})
            stream.wait(num_ends=stream.num_finals + 1)
        assert not stream.errors and pids_of(loaded.pid) == {serving}
        samples = loaded.metrics()
        assert (samples[UP], samples[RESTARTS]) == (1, before), "those are of the engine that serves"


def test_a_model_that_loads_for_long_holds_no_other_up(loaded: TritonServer, repository: Path) -> None:
    flag = repository / "is_slow"
    assert loaded.load("slow")[0] == 200
    flag.touch()
    try:
        crash(loaded, "slow")
        loaded.wait_until(lambda: loaded.log.count("serving slow version 1") == 2, "the load that takes long")
        crash(loaded, "llm")
        loaded.wait_until(lambda: not loaded.is_model_ready("llm"), "llm to be unloaded")
        loaded.wait_model_ready("llm")
        assert not loaded.is_model_ready("slow")
    finally:
        flag.unlink()
    loaded.wait_model_ready("slow")
    assert loaded.unload("slow")[0] == 200


def load_with(server: TritonServer, name: str, step_ms: int, **files: str) -> None:
    """As a load request with a config of its own, and files."""
    parameters = {"fake": {"string_value": "1"}, "step_ms": {"string_value": str(step_ms)}}
    config = json.dumps({"name": name, "backend": "slipstream", "parameters": parameters})
    body = {"parameters": {"config": config, **{f"file:{path}": text for path, text in files.items()}}}
    assert server.post(f"/v2/repository/models/{name}/load", body)[0] == 200


def step_ms_of(server: TritonServer, name: str) -> str:
    config = json.loads(server.get(f"/v2/models/{name}/config")[1])
    return config["parameters"]["step_ms"]["string_value"]


def restart(server: TritonServer, name: str) -> None:
    before = server.log.count(f'model {name} is loaded again"')
    crash(server, name)
    server.wait_until(lambda: server.log.count(f'model {name} is loaded again"') > before, "the restart")
    server.wait_model_ready(name)


def test_a_model_comes_back_with_the_config_of_its_load_request(loaded: TritonServer, repository: Path) -> None:
    folder = add_model(repository, "given", {"step_ms": "5"})
    assert loaded.load("given")[0] == 200
    restart(loaded, "given")
    assert step_ms_of(loaded, "given") == "5"
    assert "with the config of its load request" not in loaded.log
    load_with(loaded, "given", 7)
    for _ in range(2):
        restart(loaded, "given")
        assert step_ms_of(loaded, "given") == "7"
    file = folder / "config.pbtxt"
    file.write_text(file.read_text().replace('"5"', '"6"'))  # which the operator has changed since: it counts
    restart(loaded, "given")
    assert step_ms_of(loaded, "given") == "6"
    assert loaded.unload("given")[0] == 200


def test_the_file_that_the_server_names_is_the_one_that_counts(fake_backend_dir: Path, tmp_path: Path) -> None:
    """A change of it was taken for the config of a load request, and the model came back with the old one."""
    model = add_model(tmp_path, "llm", {"step_ms": "5"})
    (model / "configs").mkdir()
    named = model / "configs/h100.pbtxt"
    named.write_text((model / "config.pbtxt").read_text())
    options = {"control_mode": "explicit", "load_models": ["llm"], "extra_args": ["--model-config-name=h100"]}
    with TritonServer(tmp_path, fake_backend_dir, **options) as server:
        assert "by the configuration h100" in server.log
        named.write_text(named.read_text().replace('"5"', '"6"'))
        crash(server, "llm")
        server.wait_until(lambda: server.log.count("successfully loaded 'llm'") == 2, "the model to come back")
        _, config = server.get("/v2/models/llm/config")
        assert json.loads(config)["parameters"]["step_ms"]["string_value"] == "6"


def test_a_model_whose_files_came_with_its_load_request_is_started_again_in_place(loaded: TritonServer) -> None:
    load_with(loaded, "sent", 7, **{"1/a.txt": "aGVsbG8="})  # in no repository; the server deletes them at the unload
    crash(loaded, "sent")
    up = UP.replace("llm", "sent")
    loaded.wait_until(lambda: loaded.metrics()[up] == 1, "the engine to be back")
    [stream] = stream_many(loaded.http_url, "sent", [{"text_input": "well again"}])
    assert stream.texts() == [" well", " again"]
    assert loaded.unload("sent")[0] == 200


def test_a_version_serves_on_while_the_engine_of_another_restarts(loaded: TritonServer) -> None:
    assert loaded.load("versions")[0] == 200
    with GrpcStream(loaded.grpc_url) as stream:
        stream.send("versions", {"tokens": 2, "then": "crash"}, model_version="1")
        stream.wait(num_ends=1)
        ups = {version: UP.replace("llm", "versions").replace('"1"', f'"{version}"') for version in (1, 2)}
        while loaded.metrics()[ups[1]] == 0:
            assert loaded.is_model_ready("versions/versions/2")
            stream.send("versions", "served on", model_version="2")
            stream.wait(num_ends=len(stream.errors) + stream.num_finals + 1)
        assert len(stream.errors) == 1 and stream.num_finals > 0
        stream.send("versions", "back", model_version="1")
        stream.wait(num_texts=len(stream.texts) + 1)
    assert loaded.unload("versions")[0] == 200


def test_gauges_are_of_the_engine_that_serves(loaded: TritonServer, repository: Path) -> None:
    flag = repository / "held_is_slow"
    add_model(repository, "held", {"step_ms": "5", "slow_file": str(flag)})
    up, running = UP.replace("llm", "held"), 'slipstream_fake_running{model="held",state="running",version="1"}'
    assert loaded.load("held")[0] == 200
    with GrpcStream(loaded.grpc_url) as old, GrpcStream(loaded.grpc_url) as new, contextlib.ExitStack() as at_end:
        at_end.callback(flag.unlink, missing_ok=True)
        at_end.callback(new.cancel)
        at_end.callback(old.cancel)
        for num_tokens in (100_000, 100_000, 1500, 1):
            old.send("held", {"tokens": num_tokens})
        old.wait(num_ends=1)
        loaded.wait_until(lambda: loaded.metrics()[running] == 3, "the gauge of the engine that will be held")
        assert loaded.unload("held")[0] == 200
        flag.touch()
        load = threading.Thread(target=loaded.load, args=("held",), daemon=True)
        load.start()
        loaded.wait_until(lambda: loaded.log.count("serving held version 1") == 2, "the load that takes long")
        samples = loaded.metrics()
        flag.unlink()
        assert (samples[up], samples[running]) == (1, 3), "the one that is held serves its requests"
        load.join()
        samples = loaded.metrics()
        assert (samples[up], samples[running]) == (1, 0), "the new one has none"
        for num_tokens in (100_000, 1):
            new.send("held", {"tokens": num_tokens})
        new.wait(num_ends=1)
        loaded.wait_until(lambda: loaded.metrics()[running] == 1, "its gauge")
        assert old.num_finals == 1
        old.wait(num_ends=2)
        time.sleep(0.2)  # the engine that is held has said that it has 2
        assert loaded.metrics()[running] == 1
    assert loaded.unload("held")[0] == 200
