"""How ranks of a model end when its load fails or one is lost: soon, with the reason, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import slow_loader
import slow_sleeper
import stuck_engine
from engine_driver import make_engine, run_steps
from engine_peer import TOKEN, Backend
from failing_rank import REASON, start_of
from nodes import Node
from patience import PATIENCE_S, wait_until
from processes import children_of, is_alive
from slipstream.core.config import ParallelConfig
from slipstream.core.control import SLEEP, WAKE_UP, Control
from slipstream.core.errors import EngineError, RankLostError
from slipstream.engine import rank_processes, ranks
from slipstream.engine.engine import Engine
from slipstream.protocol.wire import ErrorCode, FrameType
from slipstream.worker import process_group

FOUR = ParallelConfig(tensor_parallel_size=4)


def ranks_here() -> list[psutil.Process]:
    return children_of(os.getpid(), "rank_main")


def test_a_failure_of_the_first_rank_is_told_soon(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, in a call that waits for this one, are listened to and ended all at once."""
    monkeypatch.setattr(rank_processes, "_END_TIMEOUT_S", 2 * PATIENCE_S)
    monkeypatch.setattr(ranks, "_FIND_S", 4.0)
    failed_at = [0.0]

    def fail(*arguments: object) -> NoReturn:
        failed_at[0] = time.monotonic()
        raise RuntimeError("no memory for the first rank")

    with pytest.raises(RuntimeError, match="no memory for the first rank"):
        make_engine(tiny_llama, parallel=FOUR, make_worker=fail)
    assert time.monotonic() - failed_at[0] < PATIENCE_S and not ranks_here(), "and not after two minutes for each"


@pytest.mark.parametrize("number", [1, 3])
def test_the_rank_that_failed_first_is_told(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """And not another one, whose calls fail because of it."""
    monkeypatch.setattr(rank_processes, "_START", start_of(number))
    with pytest.raises(EngineError, match=f"rank {number}: {REASON}"):
        make_engine(tiny_llama, parallel=FOUR)
    assert not children_of(os.getpid(), "failing_rank")


class StuckEngine:
    """The process of stuck_engine.py with two ranks, the backend's end of its socket, and what tells that it waits."""

    def __init__(self, backend: Backend, folder: Path, model: Path, place: str) -> None:
        self.backend, self._waits = backend, folder / "waits"
        command = [sys.executable, stuck_engine.__file__, str(folder), place]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen([*command, "--socket", backend.path, "--token", TOKEN.hex()], env=environment)
        backend.accept()
        parameters = {"model": model, "device": "cpu", "num_blocks": 64, "tensor_parallel_size": 2}
        backend.configure({**parameters, "enable_sleep_mode": "true"})

    def wait(self) -> None:
        wait_until(self._waits.exists, "the first rank to wait")

    def kill_rank(self) -> None:
        self.wait()
        children_of(self.process.pid, "rank_main")[0].kill()


@pytest.fixture
def stuck(backend: Backend, tmp_path: Path, tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[StuckEngine]:
    """In a process, whose place is the parameter."""
    engine = StuckEngine(backend, tmp_path, tiny_llama, request.param)
    yield engine
    engine.process.kill()
    engine.process.wait()


@pytest.mark.parametrize("stuck", ["load"], indirect=True)
def test_a_rank_that_is_lost_while_the_first_waits_for_it_in_a_load(stuck: StuckEngine) -> None:
    stuck.kill_rank()
    assert b"rank 1 has ended" in stuck.backend.next(FrameType.LOAD_FAILED)
    assert stuck.process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("stuck", ["failing rank"], indirect=True)
def test_a_rank_that_fails_while_the_first_waits_for_it_says_why(stuck: StuckEngine) -> None:
    assert f"rank 1: {REASON}".encode() in stuck.backend.next(FrameType.LOAD_FAILED)
    assert stuck.process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("stuck", ["end"], indirect=True)
def test_a_first_rank_that_fails_and_then_waits_says_why(stuck: StuckEngine) -> None:
    assert b"no memory for the first rank" in stuck.backend.next(FrameType.LOAD_FAILED)
    assert stuck.process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("stuck", ["wake"], indirect=True)
def test_a_rank_that_is_lost_while_the_first_waits_for_it_in_a_wake(stuck: StuckEngine) -> None:
    """Who has asked for it learns why, and the process ends."""
    stuck.backend.next(FrameType.READY)
    for handle, command in enumerate(("sleep", "wake_up"), 1):
        stuck.backend.request(handle, 1, control=command)
        if command == "sleep":
            assert not stuck.backend.responses_of(handle)[-1].error_message
    stuck.kill_rank()
    answer = stuck.backend.responses_of(2)[-1]
    assert answer.error_code == ErrorCode.UNAVAILABLE and "rank 1 has ended" in answer.error_message
    assert stuck.process.wait(PATIENCE_S) == 1


def test_a_rank_that_is_lost_when_all_have_loaded_fails_the_load(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody is told of losses."""

    def lose(engine: Engine) -> None:
        ranks_here()[0].kill()
        wait_until(lambda: engine.ranks.lost is not None, "the loss to be found")

    monkeypatch.setattr(Engine, "_record_gauges", lose)
    with pytest.raises(RankLostError, match="rank 1 has ended"):
        make_engine(tiny_llama, parallel=ParallelConfig(2))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_sleep_is_answered_when_all_ranks_sleep(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    """What they hold until then another model may need."""
    monkeypatch.setattr(rank_processes, "_START", slow_sleeper.start_of(tmp_path, 1.0))
    parallel = ParallelConfig(2, pipeline_parallel_size=num_stages)
    with closing(make_engine(tiny_llama, parallel=parallel)) as engine:
        order = engine.post(Control(SLEEP, 2))
        run_steps(engine, {})
        order.wait()
        assert {path.name for path in tmp_path.iterdir()} == set(map(str, range(1, parallel.num_ranks)))


def test_a_rank_that_is_lost_in_its_sleep_is_told_at_the_wake(tiny_llama: Path) -> None:
    """Which can send it nothing any more."""
    with closing(make_engine(tiny_llama, parallel=ParallelConfig(2))) as engine:
        for control in (Control(SLEEP, 1), Control(WAKE_UP)):
            if control.command == WAKE_UP:
                ranks_here()[0].kill()
                wait_until(lambda: engine.ranks.lost is not None, "the loss to be found")
            order = engine.post(control)
            run_steps(engine, {})
        with pytest.raises(RankLostError, match="rank 1 has ended"):
            order.wait()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_rank_that_does_not_sleep_is_lost(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """Stopped, or at work for longer than rank_timeout_s: nobody waits for it for ever, or takes it to sleep."""
    monkeypatch.setattr(rank_processes, "_START", slow_sleeper.start_of(tmp_path, 3600.0))
    parallel = ParallelConfig(2, rank_timeout_s=60.0 if is_stopped else 1.0)
    with closing(make_engine(tiny_llama, parallel=parallel)) as engine:
        if is_stopped:
            children_of(os.getpid(), "slow_sleeper")[0].suspend()
        order = engine.post(Control(SLEEP, 2))
        run_steps(engine, {})
        with pytest.raises(RankLostError, match="rank 1 is stopped" if is_stopped else "rank_timeout_s"):
            order.wait()
        assert isinstance(engine.error, RankLostError)


def test_who_has_asked_for_a_wake_learns_that_a_rank_is_lost(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that a call to it has failed, under a number of the log."""
    monkeypatch.setattr(rank_processes, "_START", slow_loader.start_of(1, 3600.0, notes=False, first=1))
    with closing(make_engine(tiny_llama, parallel=ParallelConfig(pipeline_parallel_size=2))) as engine:
        for control in (Control(SLEEP, 2), Control(WAKE_UP)):
            order = engine.post(control)
            if control.command == WAKE_UP:
                threading.Timer(0.5, children_of(os.getpid(), "slow_loader")[0].kill).start()
            run_steps(engine, {})
        with pytest.raises(RankLostError, match="rank 1 has ended"):
            order.wait()


def test_a_rank_that_is_stuck_in_its_load_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first one waits for it, with all that it had to do done."""
    monkeypatch.setattr(rank_processes, "_START", slow_loader.start_of(1, 3600.0, notes=False))
    with pytest.raises(RankLostError, match=r"rank 1 has done nothing for 3 s \(rank_load_timeout_s\)"):
        make_engine(tiny_llama, parallel=ParallelConfig(2, rank_load_timeout_s=3.0))
    assert not children_of(os.getpid(), "slow_loader")


def test_a_load_that_goes_on_may_take_longer_than_the_limit(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits meanwhile, and does nothing."""
    monkeypatch.setattr(rank_processes, "_START", slow_loader.start_of(1, 8.0, notes=True))
    begun = time.monotonic()
    make_engine(tiny_llama, parallel=ParallelConfig(2, rank_load_timeout_s=5.0)).close()
    assert time.monotonic() - begun > 8.0


def test_a_rank_that_is_stuck_in_a_wake_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that reads its weights again."""
    monkeypatch.setattr(rank_processes, "_START", slow_loader.start_of(1, 3600.0, notes=False, first=1))
    parallel = ParallelConfig(pipeline_parallel_size=2, rank_load_timeout_s=3.0)
    with closing(make_engine(tiny_llama, parallel=parallel)) as engine:
        for control in (Control(SLEEP, 2), Control(WAKE_UP)):
            order = engine.post(control)
            run_steps(engine, {})
        with pytest.raises(RankLostError, match=r"rank 1 has done nothing for 3 s \(rank_load_timeout_s\), after"):
            order.wait()


def test_a_rank_that_does_not_connect_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, and the one that connects is not."""
    code = "import slow_loader; slow_loader.never_connects(1)"
    monkeypatch.setattr(rank_processes, "_START", f"import sys; sys.path[:] = {{path!r}}; {code}")
    monkeypatch.setattr(process_group, "_MEETING_TIMEOUT", timedelta(seconds=6))
    with pytest.raises(EngineError, match=r"^rank 1: does not connect: not all ranks have come in 6 s"):
        make_engine(tiny_llama, parallel=ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size=2))


@pytest.mark.parametrize("stuck", ["stuck first rank"], indirect=True)
def test_a_first_rank_that_is_stuck_in_its_load_is_named(stuck: StuckEngine) -> None:
    assert b"rank 0 has done nothing for 3 s (rank_load_timeout_s)" in stuck.backend.next(FrameType.LOAD_FAILED)
    assert stuck.process.wait(PATIENCE_S) == 1


def test_a_rank_of_another_node_that_is_stuck_in_its_load_is_named(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers the engine all the time. Its process ends, and `slipstream worker` starts it again."""
    slow = "import sys\nif any('node_rank' in one for one in sys.orig_argv):\n    import slow_loader\n"
    (tmp_path / "sitecustomize.py").write_text(f"{slow}    slow_loader.patch(1, 3600.0, False, 0)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with Node(tmp_path, b"a secret of two machines") as node:
        rank = node.rank()
        nodes = ParallelConfig(2, num_nodes=2, rank_address=node.address, rank_secret_file=str(node.secret))
        with pytest.raises(RankLostError, match=r"rank 1 of node 1 has done nothing for 8 s \(rank_load_timeout_s\)"):
            make_engine(tiny_llama, parallel=replace(nodes, rank_load_timeout_s=8.0, node_timeout_s=PATIENCE_S))
        wait_until(lambda: not is_alive(rank), "the rank to end with the load")
