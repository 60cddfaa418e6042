"""Grammar processes that are killed, crash or lose their engine: who is told what, and what is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import Told, make_engine, run_steps
from grammar_processes import GUIDED, process_of, served_engine, start, worker_of, workers_of
from processes import only_child, wait_gone
from slipstream import LLM
from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig, StructuredOutputConfig
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide
from slipstream.engine import grammar_link
from slipstream.engine.child_process import start_process
from slipstream.engine.engine import Engine
from slipstream.engine.grammar_messages import MAX_KILLS

SLOW_TO_COMPILE = Guide("regex", "|".join(f"([a-z]{{{n},9999}}x){{1,9999}}" for n in range(9000, 9400)))
CRASH = signal.SIGTRAP  # no library handles it, so that all threads end at once
ENGINE_OF_ITS_OWN = """
import sys, time
from pathlib import Path
sys.path[:] = {path!r}
from engine_driver import make_engine, run_steps
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide, SamplingParams
engine = make_engine(Path({checkpoint!r}))
engine.submit(Request([70, 201, 33], SamplingParams(max_tokens=9, guide=Guide("regex", "[a-z]*"))))
run_steps(engine, {{}})
print(engine._structured._host._link._process.pid, flush=True)
time.sleep(600)
"""


def _step_until(engine: Engine, told: dict[Request, Told], is_true: Callable[[], object]) -> None:
    for _ in range(20_000):
        if is_true():
            return
        assert engine.has_work, [one.error for one in told.values()]
        run_steps(engine, told, 1)
    raise AssertionError("it does not come to that")


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "slipstream" in name or "grammar" in name}


# ---------------------------------------------------------------- killed from outside


def test_a_process_killed_at_its_start_is_started_again(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    request, one = start(engine)
    told, killed = {request: one}, set()
    while len(killed) < MAX_KILLS - 1:
        _step_until(engine, told, lambda: process_of(engine) not in {0, *killed})
        killed.add(process_of(engine))
        os.kill(process_of(engine), signal.SIGKILL)
    run_steps(engine, told)
    assert one.error == "" and one.finish_reason is FinishReason.STOP and len(one.token_ids) > 3
    engine.close()


def test_a_process_that_never_starts_ends_who_waits_for_it(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    request, one = start(engine)
    told, killed = {request: one}, set()
    while one.finish_reason is None:
        _step_until(engine, told, lambda: one.finish_reason or process_of(engine) not in {0, *killed})
        if one.finish_reason is None:
            killed.add(process_of(engine))
            os.kill(process_of(engine), signal.SIGKILL)
    assert len(killed) == MAX_KILLS
    assert one.fault is CapacityError and "structured output is not available" in one.error
    assert engine._structured._host.is_idle and engine.error is None
    again, two = start(engine)
    run_steps(engine, {again: two})
    assert two.error == "" and two.finish_reason is FinishReason.STOP
    engine.close()


def test_where_xgrammar_is_not_installed_only_guided_requests_fail(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xgrammar.py").write_text("raise ImportError\n")
    monkeypatch.setattr(grammar_link, "start_process", start_process)  # one that is forked has imported it already
    monkeypatch.syspath_prepend(tmp_path)
    engine = make_engine(tiny_llama)
    told = dict([start(engine), start(engine, replace(GUIDED, guide=None))])
    run_steps(engine, told)
    guided, free = told.values()
    assert guided.fault is CapacityError and guided.error.startswith("structured output is not available")
    assert free.error == "" and free.token_ids and engine.error is None
    engine.close()


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> Iterator[Engine]:
    with served_engine(tiny_llama, StructuredOutputConfig(max_compile_ms=1500)) as engine:
        yield engine


def _end_worker_in_a_call(engine: Engine, told: dict[Request, Told], signal_number: int) -> None:
    """While it has a call of the request, which it does not answer."""
    (request,) = told
    state, link = request.grammar_state, engine._structured._host._link
    _step_until(engine, told, lambda: state.is_open and workers_of(engine))
    worker = worker_of(engine)
    os.kill(worker, signal.SIGSTOP)
    _step_until(engine, told, lambda: state.asked_at)
    generation = link._generation
    os.kill(worker, signal_number)
    os.kill(worker, signal.SIGCONT)
    wait_gone(worker)
    _step_until(engine, told, lambda: link._generation > generation)


def test_workers_killed_from_outside_are_not_the_doing_of_a_request(served: Engine) -> None:
    request, expected = start(served)
    run_steps(served, {request: expected})
    request, one = start(served)
    for _ in range(3):
        _end_worker_in_a_call(served, {request: one}, signal.SIGKILL)
    run_steps(served, {request: one})
    assert (one.error, one.token_ids) == ("", expected.token_ids)


def test_workers_that_crash_at_different_tokens_are_not_its_doing_either(served: Engine) -> None:
    request, one = start(served)
    for num_tokens in (3, 8, 13):
        _step_until(served, {request: one}, lambda wanted=num_tokens: len(one.token_ids) >= wanted)
        _end_worker_in_a_call(served, {request: one}, CRASH)
    run_steps(served, {request: one})
    assert one.error == "" and one.finish_reason is FinishReason.STOP


def test_workers_that_crash_twice_at_one_token_are(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request, one = start(served)
    told = {request: one}
    _step_until(served, told, lambda: len(one.token_ids) >= 3)
    link = served._structured._host._link
    send = link.send_to_worker

    def crash_and_send(kind: str, *arguments: object) -> None:
        if kind == "open":
            worker = worker_of(served)
            os.kill(worker, CRASH)
            wait_gone(worker)
        send(kind, *arguments)

    monkeypatch.setattr(link, "send_to_worker", crash_and_send)
    _end_worker_in_a_call(served, told, CRASH)
    run_steps(served, told)
    assert one.fault is RequestError and "guided_memory_bytes" in one.error and "cannot be done" in one.error
    monkeypatch.undo()
    again, two = start(served)
    run_steps(served, {again: two})
    assert two.error == "" and two.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_kills", [2, MAX_KILLS])
def test_a_trial_killed_from_outside_says_nothing_of_its_grammar(served: Engine, num_kills: int) -> None:
    guide = replace(SLOW_TO_COMPILE, text=f"{SLOW_TO_COMPILE.text}|{num_kills}")
    known = {worker_of(served)}
    request, one = start(served, replace(GUIDED, guide=guide))
    for _ in range(num_kills):
        _step_until(served, {request: one}, lambda: workers_of(served) - known)
        (trial,) = workers_of(served) - known
        known.add(trial)
        os.kill(trial, signal.SIGKILL)
    run_steps(served, {request: one})
    if num_kills < MAX_KILLS:
        assert one.fault is RequestError and "takes more CPU time than guided_max_compile_ms=1500" in one.error
    else:
        assert one.fault is CapacityError and "ended from outside" in one.error


# ---------------------------------------------------------------- an engine that is gone


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_killed_engine_takes_its_grammar_processes_along(tiny_llama: Path, state: str) -> None:
    before = _shared_memory()
    code = ENGINE_OF_ITS_OWN.format(path=[place for place in sys.path if place], checkpoint=str(tiny_llama))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            process = int(engine.stdout.readline())
            pids = [process, only_child(process).pid]
            if state == "stopped":  # it does not see that its socket is closed
                os.kill(process, signal.SIGSTOP)
        finally:
            engine.kill()
    wait_gone(*pids)
    assert _shared_memory() == before


@pytest.mark.parametrize("way", ["closed", "deleted"])
def test_an_engine_in_process_takes_them_along(tiny_llama: Path, way: str) -> None:
    before = _shared_memory()
    model = ModelConfig(model=str(tiny_llama), device="cpu")
    llm = LLM.from_config(EngineConfig(model=model, cache=CacheConfig(block_size=8, num_blocks=64)))
    llm.generate("a", GUIDED)
    pids = [process_of(llm.engine), worker_of(llm.engine)]
    if way == "closed":
        llm.close()
    else:
        del llm
        gc.collect()
    wait_gone(*pids)
    assert _shared_memory() == before
