"""The start of the engine process: the other ranks begin first and never outlive it, and little is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from engine_peer import TIMEOUT_S, TOKEN, Backend
from patience import wait_until
from processes import children_of, only_child, wait_gone
from slipstream.core.config import ParallelConfig
from slipstream.engine.rank_processes import MOST_AHEAD, RankProcess, RankProcesses
from slipstream.protocol.wire import FrameType

# of what lies in an environment beside torch and its needs; each takes 50 ms to some seconds
NOT_AT_START = {
    *("transformers", "huggingface_hub", "triton", "xgrammar", "sympy", "scipy", "pandas", "jinja2", "PIL", "requests"),
    *("torch._dynamo", "torch._inductor", "torch.onnx", "torch.utils.cpp_extension", "grpc", "zmq"),
    *("google.protobuf", "tritonclient", "opentelemetry", "onnxruntime", "pytest"),
}


@dataclass
class Started:
    """What a process of two ranks did until it was ready. events: in order, of "rank 1" and "torch"."""

    events: list[str]
    modules: list[str]
    collects: bool
    num_frozen: int


@pytest.fixture(scope="module")
def started(demo_model: Path) -> Started:
    code = f"""
import sys
events = []
def note(name, arguments):
    if name == "import" and arguments[0] == "torch":
        events.append("torch")
    if name == "subprocess.Popen" and "rank_main" in str(arguments[1]):
        events.append("rank 1")
sys.addaudithook(note)
from slipstream.core.config_parse import config_from_values
from slipstream.engine.main import load
config = {{"model": {str(demo_model)!r}, "device": "cpu", "num_blocks": 64, "tensor_parallel_size": 2}}
server = load(None, config_from_values(config))
modules = sorted(sys.modules)
import gc, json
print(json.dumps([events, modules, gc.isenabled(), gc.get_freeze_count()]))
server._engine.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return Started(*json.loads(done.stdout))


def test_other_ranks_begin_before_torch_is_imported(started: Started) -> None:
    """Which takes seconds, so that all ranks do it at the same time."""
    assert started.events == ["rank 1", "torch"]


def test_a_start_imports_no_more_than_it_needs(started: Started) -> None:
    """Neither does a rank, whose modules are some of these."""
    assert "torch" in started.modules and "slipstream.worker.worker" in started.modules
    assert sorted(NOT_AT_START.intersection(started.modules)) == []


def test_what_is_imported_is_passed_over_by_the_garbage_collector(started: Started) -> None:
    assert started.collects and started.num_frozen > 100_000


@pytest.fixture
def process(backend: Backend) -> Iterator[subprocess.Popen[str]]:
    """The engine process before it is told its configuration."""
    command = [sys.executable, "-m", "slipstream.engine.main", "--socket", backend.path, "--token", TOKEN.hex()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as one:
        backend.accept()
        yield one
        one.kill()


@pytest.fixture
def rank(backend: Backend, process: subprocess.Popen[str], demo_model: Path) -> Iterator[psutil.Process]:
    """The second rank's process, which has just begun to import."""
    backend.configure({"model": demo_model, "device": "cpu", "num_blocks": 64, "tensor_parallel_size": 2})
    found = only_child(process.pid, "rank_main")
    yield found
    with suppress(psutil.Error):
        found.kill()


def test_a_rank_ends_with_an_engine_that_is_stopped_while_both_import(
    process: subprocess.Popen[str], rank: psutil.Process
) -> None:
    """It cannot see that its connection has ended: the kernel ends it."""
    maps = Path(f"/proc/{rank.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "the rank to import torch")
    rank.suspend()
    process.terminate()
    process.wait(TIMEOUT_S)
    wait_gone(rank.pid)


def test_a_rank_that_dies_while_it_imports_fails_the_load(
    backend: Backend, process: subprocess.Popen[str], rank: psutil.Process
) -> None:
    rank.kill()
    assert b"rank 1 has ended" in backend.next(FrameType.LOAD_FAILED)
    assert process.wait(TIMEOUT_S) == 1


def test_ranks_end_quietly_when_the_load_is_refused(
    backend: Backend, process: subprocess.Popen[str], demo_model: Path
) -> None:
    """They may still import, and have not been told their part."""
    backend.configure({"model": demo_model, "device": "cpu", "tensor_parallel_size": 3})
    wait_until(lambda: len(children_of(process.pid, "rank_main")) == 2, "two ranks to begin")
    ranks = children_of(process.pid, "rank_main")
    assert b"which 3 ranks do not share evenly" in backend.next(FrameType.LOAD_FAILED)
    assert process.stderr is not None and "Traceback" not in process.stderr.read()
    wait_gone(*(rank.pid for rank in ranks))


def test_more_ranks_than_machines_have_devices_begin_after_the_checks() -> None:
    """Else a wrong number would start that many processes only to be refused."""
    for parallel in (ParallelConfig(MOST_AHEAD, pipeline_parallel_size=2), ParallelConfig()):
        processes = RankProcesses.ahead(parallel)
        assert not processes.ranks
        processes.close()
    half = RankProcesses.ahead(ParallelConfig(4, num_nodes=2))
    assert [rank.number for rank in half.ranks] == [1], "those of other nodes are not started here"
    half.close()
    assert not children_of(psutil.Process().pid, "rank_main")


def test_a_rank_that_cannot_be_started_leaves_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(RankProcess):
        def __init__(self, number: int) -> None:
            if number == 2:
                raise OSError("no more processes")
            super().__init__(number)

    monkeypatch.setattr("slipstream.engine.rank_processes.RankProcess", Failing)
    num_open = psutil.Process().num_fds()
    processes = RankProcesses()
    with pytest.raises(OSError, match="no more processes"):
        processes.start(3)
    wait_until(lambda: psutil.Process().num_fds() == num_open, "the descriptors to be closed")
    assert not children_of(psutil.Process().pid, "rank_main")


def test_ranks_leave_no_folder_behind(
    backend: Backend, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unload ends the process at once, without Python's own clean-up."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    command = [sys.executable, "-m", "slipstream.engine.main", "--socket", backend.path, "--token", TOKEN.hex()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        backend.accept()
        backend.configure({"model": demo_model, "device": "cpu", "num_blocks": 64, "tensor_parallel_size": 2})
        backend.next(FrameType.READY)
        assert [found.name[:17] for found in folder.iterdir()] == ["slipstream-ranks-"]
        backend.connection.close()
        _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and list(folder.iterdir()) == []
    assert "Error" not in log and "Traceback" not in log
