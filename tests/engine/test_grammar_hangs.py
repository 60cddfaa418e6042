"""Grammar processes that are stopped, hang or read nothing: they have their time, then others take their place, and
nothing of it holds up the engine or costs a request its answer."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, Told, make_engine, run_steps
from given_time import given_seconds
from grammar_processes import GUIDED, process_of, served_engine, signal_a_trial, start, state_of, worker_of
from patience import wait_until
from processes import only_child, wait_gone
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import CapacityError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide
from slipstream.engine import grammar_link
from slipstream.engine.engine import Engine
from slipstream.engine.grammar_channel import Channel
from slipstream.engine.grammar_link import GrammarLink, _cpu_seconds
from slipstream.engine.grammar_messages import MAX_KILLS, Setup

GONE_S = 300.0  # of a machine on which a process needs minutes to start
WORKERS_THAT_HANG = """
import os, sys, time
sys.path[:] = {path!r}
from slipstream.engine.grammar_process import GrammarProcess, main
work = GrammarProcess._work
def hang(process, *fds):
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}}\\n")
    with open({log!r}) as log:
        if len(log.readlines()) <= {num_hanging}:
            time.sleep(600)
    work(process, *fds)
GrammarProcess._work = hang
main()
"""


def _steps(engine: Engine, told: dict[Request, Told], seconds: float = GONE_S) -> Iterator[None]:
    """Step after step, for a bounded time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert engine.has_work, [one.error for one in told.values()]
        run_steps(engine, told, 1)
        yield
    raise AssertionError(f"it does not come to that within {seconds} s")


@contextmanager
def _little_patience(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For as long as one process hangs; those after it need their time to start."""
    with monkeypatch.context() as patience:
        patience.setattr(grammar_link, "MAX_GRAMMAR_SILENCE_S", 0.5, raising=False)
        yield
    engine._structured._host._link._check_due += GONE_S


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    engine = make_engine(tiny_llama)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> Iterator[Engine]:
    with served_engine(tiny_llama, StructuredOutputConfig(max_compile_ms=200)) as engine:
        yield engine


# ---------------------------------------------------------------- a deadline for each


def test_a_process_that_is_stopped_at_its_start_is_replaced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request, one = start(engine)
    told = {request: one}
    with _little_patience(engine, monkeypatch):
        for _ in _steps(engine, told):
            if stopped := process_of(engine):
                break
        os.kill(stopped, signal.SIGSTOP)
        for _ in _steps(engine, told):
            if process_of(engine) not in (0, stopped):
                break
    run_steps(engine, told)
    assert one.error == "" and one.finish_reason is FinishReason.STOP
    wait_gone(stopped)


def test_a_process_that_is_stopped_with_a_trial_is_replaced(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = [process_of(served), worker_of(served)]
    os.kill(stopped[0], signal.SIGSTOP)
    request, one = start(served, replace(GUIDED, guide=Guide("regex", "[a-z]{41}")))
    told = {request: one}
    with _little_patience(served, monkeypatch):
        for _ in _steps(served, told):
            if process_of(served) not in (0, stopped[0]):
                break
    run_steps(served, told)
    assert one.error == "" and one.finish_reason is FinishReason.STOP
    wait_gone(*stopped)


@pytest.mark.parametrize("num_hanging", [1, MAX_KILLS])
def test_a_worker_that_hangs_at_its_start_is_replaced(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_hanging: int
) -> None:
    log = tmp_path / "workers"
    program = WORKERS_THAT_HANG.replace("{log!r}", repr(str(log))).replace("{num_hanging}", str(num_hanging))
    monkeypatch.setattr(grammar_link, "_START", program)
    request, one = start(engine)
    told = {request: one}
    for _ in _steps(engine, told):
        if log.exists() and log.read_text():  # the first is not killed before it is counted
            break
    for number in range(1, num_hanging + 1):
        engine._structured._host._link._worker_due = 0.0  # its time is over
        for _ in _steps(engine, told) if number < MAX_KILLS else ():
            if len(log.read_text().splitlines()) > number:
                break
    run_steps(engine, told)
    if num_hanging < MAX_KILLS:
        assert one.error == "" and one.finish_reason is FinishReason.STOP
    else:
        assert one.fault is CapacityError and "structured output is not available" in one.error
    wait_gone(*map(int, log.read_text().split()[:num_hanging]))


def test_a_trial_that_is_stopped_is_not_the_doing_of_its_grammar(served: Engine) -> None:
    def ask(attempt: int) -> dict[Request, Told]:
        text = "|".join(f"[a-z]{{{n}}}" for n in range(90 + attempt))
        return dict([start(served, replace(GUIDED, guide=Guide("regex", text)))])

    caught = signal_a_trial(served, ask, signal.SIGSTOP)
    run_steps(served, caught.told)
    [one] = caught.told.values()
    assert one.error == "" and one.finish_reason is not None
    wait_gone(caught.trial)


def test_a_process_that_gets_little_time_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    link = GrammarLink(Setup("", 32, [], StructuredOutputConfig()), num_rows=1)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            link._process = busy
            for _ in range(3):
                wait_until(lambda: _cpu_seconds(busy) > link._cpu_s, "CPU time")
                assert not link._hangs(0.0)
            os.kill(busy.pid, signal.SIGSTOP)
            wait_until(lambda: state_of(busy.pid) == "T", "the stop")
            link._hangs(0.0)
            assert link._hangs(0.0)
            os.kill(busy.pid, signal.SIGCONT)
            wait_until(lambda: _cpu_seconds(busy) > link._cpu_s, "CPU time")
            monkeypatch.setattr(grammar_link, "MAX_GRAMMAR_START_S", 0.0)
            assert link._hangs(0.0)
        finally:
            busy.kill()


# ---------------------------------------------------------------- nothing waits for them


def test_descriptors_wait_for_a_peer_that_reads_nothing_and_nobody_else_does(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    channel, peer = Channel(ours, is_blocking=False), Channel(theirs, is_blocking=True)
    files = [tmp_path / "first", tmp_path / "second"]
    for file in files:
        file.write_text(file.name)
    began = given_seconds()
    channel.send(("many bytes", b"x" * (4 << 20)))
    for number, file in enumerate(files):
        with file.open() as opened:
            channel.send(("file", number), (opened.fileno(),))
        channel.send(("between",))
    assert given_seconds() - began < 0.5
    messages = []
    while len(messages) < 5:
        messages += peer.receive()
        channel.receive()  # which sends what is left
    assert [message[0] for message in messages] == ["many bytes", "file", "between", "file", "between"]
    assert [os.read(fd, 100).decode() for fd in peer.fds] == ["first", "second"]
    for fd in peer.fds:
        os.close(fd)
    num_open = len(os.listdir("/proc/self/fd"))
    channel.send(("many bytes", b"x" * (4 << 20)))
    with files[0].open() as opened:
        channel.send(("never sent",), (opened.fileno(),))
    channel.close()
    peer.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - 2


def test_a_stopped_process_holds_up_no_step(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a worker is to be forked, behind more messages than the socket has room for."""
    process, link = process_of(served), served._structured._host._link
    start_worker = link.start_worker

    def start_behind_others() -> None:
        os.kill(process, signal.SIGSTOP)
        for _ in range(40):
            link.send_to_process("forget", b"a key that it does not know" * 1000)
        start_worker()

    told = dict([start(served), start(served, replace(GREEDY, max_tokens=200))])
    with monkeypatch.context() as stopping:
        stopping.setattr(link, "start_worker", start_behind_others)
        stopping.setattr(grammar_link, "MAX_GRAMMAR_SILENCE_S", 10 * GONE_S)  # however long the steps take
        worker = only_child(process).pid
        os.kill(worker, signal.SIGKILL)
        times = [given_seconds()]
        for _ in itertools.takewhile(lambda _: len(times) < 150, _steps(served, told)):
            times.append(given_seconds())
    assert max(after - before for before, after in itertools.pairwise(times)) < 1.0
    assert process_of(served) == process and state_of(process) == "T"
    os.kill(process, signal.SIGCONT)
    run_steps(served, told)
    assert process_of(served) == process and {one.error for one in told.values()} == {""}


# ---------------------------------------------------------------- nothing outlives the process that forks


def test_what_hangs_in_a_worker_ends_with_the_process_that_forked_it(served: Engine) -> None:
    process = process_of(served)
    worker = only_child(process).pid
    os.kill(worker, signal.SIGSTOP)  # none of its threads sees that a socket is closed
    os.kill(process, signal.SIGKILL)
    wait_gone(process, worker)
    request, one = start(served)
    run_steps(served, {request: one})
    assert one.error == "" and one.finish_reason is FinishReason.STOP
