"""Grammars made to freeze, kill or bloat the engine: each ends by itself, and nobody beside it notices."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, Told, make_engine, run_steps
from given_time import given_seconds
from grammar_processes import LETTERS, PROMPT, process_of, signal_a_trial, worker_of, workers_of
from patience import PATIENCE_S
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import RequestError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine import grammar_host, grammar_link, structured_output
from slipstream.engine.engine import Engine

VICTIM = replace(GREEDY, max_tokens=150)
GUIDED = SamplingParams(max_tokens=400, temperature=1.0, seed=1)
# Each time as long to match as the text before it squared, or more
NESTED_LOOPS = Guide("regex", "((((([^0]*)*)*)*)*)*0")
AMBIGUOUS = Guide("ebnf_grammar", 'root ::= s "0"\ns ::= s s s | s s | [^0] | ""')
HARMLESS = Guide("regex", "[a-z]{500}")
MOST_SLOWER = 1.5
GAP_FLOOR_S = 0.4  # a shorter gap may be a busy machine's
ATTEMPTS = 5
LATE_S = 3 * structured_output.GRACE_S
WORKERS_THAT_ARE_LATE = """
import sys, time
sys.path[:] = {path!r}
from slipstream.engine.grammar_process import main
from slipstream.engine.grammar_worker import GrammarWorker
advance = GrammarWorker._advance
def late(worker, *arguments):
    time.sleep({seconds})
    return advance(worker, *arguments)
GrammarWorker._advance = late
main()
"""
WORKERS_THAT_OPEN_LATE = """
import sys, time
sys.path[:] = {path!r}
from slipstream.engine.grammar_process import main
from slipstream.engine.grammar_worker import GrammarWorker
make = GrammarWorker._open
def late(worker, *arguments):
    time.sleep({seconds})
    answer = make(worker, *arguments)
    with open({file}, "a") as file:
        print(len(worker._sequences), file=file)
    return answer
GrammarWorker._open = late
main()
"""
MANY_PROPERTIES = {"properties": {f"property_{number}": {"type": "string"} for number in range(990)}}
# Within all limits of size, and not to be compiled in any time or memory
TOO_LONG = Guide("regex", "|".join(f"([a-z]{{{n},9999}}x){{1,9999}}" for n in range(9000, 9400)))


@pytest.fixture(scope="module")
def limited(tiny_llama: Path) -> Engine:
    """Whose grammars have little time."""
    limits = StructuredOutputConfig(max_compile_ms=1000, max_request_ms=400, cache_bytes=1 << 20)
    engine = make_engine(tiny_llama, structured_output=limits)
    run_steps(engine, _submit(engine, Guide("json")))  # the process has started
    return engine


def _submit(engine: Engine, *guides: Guide, params: SamplingParams = GUIDED) -> dict[Request, Told]:
    requests = [engine.submit(Request(list(PROMPT), replace(params, guide=guide), handle=7))[0] for guide in guides]
    return {request: Told() for request in requests}


def _victim(engine: Engine, told: dict[Request, Told]) -> tuple[list[int], list[float]]:
    """A stream beside the requests of `told`: its tokens and the time between them."""
    (victim,) = engine.submit(Request(list(PROMPT), VICTIM, handle=1))
    times = []
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.request, Told()).take(output)
            if output.request is victim:
                times.append(given_seconds())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return told.pop(victim).token_ids, gaps


def _texts(told: dict[Request, Told]) -> dict[int, list[int]]:
    return {request.sequence_index: one.token_ids for request, one in told.items()}


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _assert_unharmed(engine: Engine, attack: Callable[[int], list[Guide]]) -> dict[Request, Told]:
    """A stream beside grammars made to hurt has the tokens that it has beside harmless ones, as many in a step, and at
    most MOST_SLOWER times as slowly in the best of some attempts, each against the same machine's quiet phase just
    before. attack: the grammars of an attempt. Returns what they were told."""
    seen = []
    for attempt in range(ATTEMPTS):
        guides = attack(attempt)
        harmless = _submit(engine, *[HARMLESS] * len(guides), params=replace(GUIDED, max_tokens=160))
        expected, quiet = _victim(engine, harmless)
        told = _submit(engine, *guides)
        token_ids, gaps = _victim(engine, told)
        assert token_ids == expected
        assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0
        slower = statistics.median(gaps) / statistics.median(quiet)
        if slower <= MOST_SLOWER and max(gaps) <= max(MOST_SLOWER * max(quiet), GAP_FLOOR_S):
            return told
        seen.append(f"median {slower:.2f} x the quiet one, largest gap {max(gaps):.2f} s, quiet {max(quiet):.2f} s")
    raise AssertionError("\n".join(seen))


@pytest.mark.parametrize("guide", [NESTED_LOOPS, AMBIGUOUS], ids=lambda guide: guide.type)
def test_a_grammar_that_is_slow_to_match_ends_by_itself_and_costs_others_nothing(limited: Engine, guide: Guide) -> None:
    for attack in _assert_unharmed(limited, lambda _: [guide] * 2).values():
        assert attack.fault is RequestError and len(attack.token_ids) > 10
        assert f"this {guide.type} t" in attack.error and "accepted: guided_max_" in attack.error


def test_grammars_that_cannot_be_compiled_cost_others_nothing(limited: Engine) -> None:
    texts = lambda attempt: [replace(TOO_LONG, text=f"{TOO_LONG.text}|{attempt}{name}") for name in "ab"]  # noqa: E731
    for attack in _assert_unharmed(limited, texts).values():
        assert attack.fault is RequestError and "compiling this regex takes more" in attack.error


def test_schemas_at_the_limits_cost_others_nothing(limited: Engine) -> None:
    schemas = lambda attempt: [  # noqa: E731
        Guide("json_schema", json.dumps(MANY_PROPERTIES | {"title": f"{attempt}{number}"})) for number in range(2)
    ]
    told = _assert_unharmed(limited, schemas)
    assert all(one.error == "" or "guided_max_" in one.error for one in told.values())


def test_a_grammar_that_cannot_be_compiled_is_refused_while_others_are_served(limited: Engine) -> None:
    told = _submit(limited, TOO_LONG, LETTERS)
    costly, simple = told
    while told[simple].finish_reason is None:
        for output in limited.step():
            told[output.request].take(output)
    assert told[simple].finish_reason is FinishReason.STOP and told[costly].finish_reason is None
    run_steps(limited, told)
    assert told[costly].fault is RequestError and told[costly].token_ids == []
    assert "compiling this regex takes more" in told[costly].error
    again = _submit(limited, TOO_LONG)
    run_steps(limited, again, 20)  # known by now: no second trial
    assert again[next(iter(again))].error == told[costly].error


def test_cancel_and_deadline_are_heard_while_a_grammar_is_compiled(limited: Engine) -> None:
    told: dict[Request, Told] = {}
    slow = replace(GUIDED, guide=Guide("regex", TOO_LONG.text + "|late"))
    (cancelled,) = limited.submit(Request(list(PROMPT), slow, handle=3))
    (late,) = limited.submit(Request(list(PROMPT), slow, handle=4, deadline=time.monotonic() + 0.1))
    run_steps(limited, told, 2)
    limited.cancel(3)
    run_steps(limited, told)  # the trial itself takes a second and more of CPU time, and ends in an error
    assert told[cancelled].finish_reason is FinishReason.CANCELLED
    assert told[late].finish_reason is FinishReason.TIMEOUT
    assert limited._structured._host.is_idle


@pytest.mark.parametrize("victim", ["worker", "process"])
def test_a_killed_process_loses_no_text(limited: Engine, victim: str) -> None:
    params = replace(GUIDED, n=3)
    undisturbed = _submit(limited, LETTERS, params=params)
    run_steps(limited, undisturbed)
    told = _submit(limited, LETTERS, params=params)
    while max(len(one.token_ids) for one in told.values()) < 8:
        run_steps(limited, told, 1)
    os.kill(worker_of(limited) if victim == "worker" else process_of(limited), signal.SIGKILL)
    run_steps(limited, told)
    assert [one.error for one in told.values()] == [""] * 3
    assert _texts(told) == _texts(undisturbed)
    assert limited.error is None and limited.scheduler.cache.num_used_blocks == 0


def test_a_stuck_process_is_killed_and_others_go_on(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, structured_output=StructuredOutputConfig(max_step_ms=300))
    run_steps(engine, _submit(engine, LETTERS))
    expected, _ = _victim(engine, {})
    worker = worker_of(engine)
    told = _submit(engine, LETTERS)
    while not next(iter(told.values())).token_ids:
        run_steps(engine, told, 1)
    os.kill(worker, signal.SIGSTOP)
    token_ids, gaps = _victim(engine, told)
    assert token_ids == expected and max(gaps) < 1.0
    (stuck,) = told.values()
    assert stuck.fault is RequestError and "guided_max_step_ms=300" in stuck.error
    again = _submit(engine, LETTERS)
    run_steps(engine, again)
    assert all(one.finish_reason is FinishReason.STOP for one in again.values())
    engine.close()


def test_a_trial_that_somebody_kills_is_not_the_grammars_fault(limited: Engine) -> None:
    def ask(attempt: int) -> dict[Request, Told]:
        return _submit(limited, Guide("regex", "|".join(f"[a-z]{{{n}}}" for n in range(1, 150 + attempt))))

    told = signal_a_trial(limited, ask, signal.SIGKILL).told
    run_steps(limited, told)
    assert [one.error for one in told.values()] == [""]


def test_a_call_that_outlives_its_request_ends_though_nobody_else_comes(
    limited: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = limited._structured._host
    monkeypatch.setattr(host, "_limits", replace(host._limits, max_step_ms=100))
    monkeypatch.setattr(grammar_host, "_KILL_DELAY_S", PATIENCE_S)
    told = _submit(limited, LETTERS)
    while not next(iter(told.values())).token_ids:
        run_steps(limited, told, 1)
    worker = worker_of(limited)
    os.kill(worker, signal.SIGSTOP)
    run_steps(limited, told)
    assert not limited.has_work and not host.is_idle
    monkeypatch.setattr(grammar_host, "_KILL_DELAY_S", 0.2)
    deadline = time.monotonic() + PATIENCE_S
    while worker in workers_of(limited) and time.monotonic() < deadline:
        limited.wait(0.05)
    assert worker not in workers_of(limited) and host.is_idle


def test_keys_of_grammars_are_not_kept_for_ever(limited: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_host, "MAX_KNOWN_GRAMMARS", 3)
    host = limited._structured._host
    for number in range(8):
        told = _submit(limited, Guide("regex", f"[a-z]{number}"), params=replace(GUIDED, max_tokens=1))
        run_steps(limited, told)
        assert [one.error for one in told.values()] == [""]
    assert len(host._compiled) <= 3


@pytest.mark.parametrize("lacks", ["memory for masks", "processes"])
def test_what_the_machine_lacks_ends_guided_requests_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    engine = make_engine(tiny_llama)
    place = (grammar_link.os, "memfd_create") if lacks == "memory for masks" else (grammar_link, "start_process")
    try:
        with monkeypatch.context() as lacking:
            lacking.setattr(*place, refuse)
            told = _submit(engine, LETTERS)
            tokens, _ = _victim(engine, told)
            assert tokens and engine.error is None
            assert all("structured output is not available" in one.error for one in told.values())
        again = _submit(engine, LETTERS)
        run_steps(engine, again)
        assert [one.error for one in again.values()] == [""]
    finally:
        engine.close()


def test_an_engine_may_have_many_files_open(tiny_llama: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("the limit of open files is below 2048")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    open_files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    engine = make_engine(tiny_llama)
    try:
        told = _submit(engine, LETTERS)
        run_steps(engine, told)
        assert [one.error for one in told.values()] == [""] and engine.error is None
    finally:
        engine.close()
        for descriptor in open_files:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_late_masks_change_no_text(limited: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no patience at all nearly every mask is late, and its request left out of steps until it is there."""
    guides = LETTERS, Guide("json"), Guide("regex", "[a-f]{2}-[0-9]{30}")
    patient = _submit(limited, *guides)
    run_steps(limited, patient)
    monkeypatch.setattr(structured_output, "GRACE_S", 0.0)
    told = _submit(limited, *guides)
    run_steps(limited, told)
    assert any(request.num_preemptions for request in told)
    assert [one.token_ids for one in told.values()] == [one.token_ids for one in patient.values()]


def test_steps_wait_once_for_a_grammar_that_is_late_for_each_token(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks take no CPU time, so that no budget ends it: only the hold keeps it out of the steps of others."""
    program = WORKERS_THAT_ARE_LATE.replace("{seconds}", str(LATE_S))
    monkeypatch.setattr(grammar_link, "_START", program)
    engine = make_engine(tiny_llama)
    try:
        expected, _ = _victim(engine, {})
        told = _submit(engine, LETTERS, params=replace(GUIDED, max_tokens=12))
        tokens, _ = _victim(engine, told)
        ((request, late),) = told.items()
        assert tokens == expected and late.error == "" and len(late.token_ids) == 12
        assert request.num_preemptions <= 1  # withdrawn from a step that had waited for it
    finally:
        engine.close()


def test_a_request_that_ends_while_its_matcher_is_made_leaves_none(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "matchers"
    program = WORKERS_THAT_OPEN_LATE.replace("{seconds}", "0.1").replace("{file}", repr(str(counts)))
    monkeypatch.setattr(grammar_link, "_START", program)
    engine = make_engine(tiny_llama)
    try:
        run_steps(engine, _submit(engine, LETTERS))
        for _ in range(3):
            told = _submit(engine, LETTERS)
            (request,) = told
            while not request.grammar_state.asked_at:
                run_steps(engine, told, 1)
            engine.cancel(7)
            run_steps(engine, told)
            assert told[request].finish_reason is FinishReason.CANCELLED and not told[request].token_ids
            while not engine._structured._host.is_idle:
                engine.wait(0.01)
        assert counts.read_text().split() == ["1"] * 4
    finally:
        engine.close()


def test_memory_stays_bounded_over_many_grammars(limited: Engine) -> None:
    """The engine holds none of them, the worker cache_bytes' worth."""

    def serve(numbers: range) -> None:
        for number in numbers:
            names = {f"property_{number}_{index}": {"type": "string"} for index in range(30)}
            schema = json.dumps({"type": "object", "properties": names})
            told = _submit(limited, Guide("json_schema", schema), params=replace(GUIDED, max_tokens=2))
            run_steps(limited, told)

    serve(range(20))
    worker = worker_of(limited)
    own, forked = _resident_bytes(os.getpid()), _resident_bytes(worker)
    serve(range(20, 80))
    assert _resident_bytes(os.getpid()) - own < 8 << 20
    assert _resident_bytes(worker) - forked < 24 << 20
