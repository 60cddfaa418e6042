"""Whose turn it is with grammars: which is tried next, who gets the next rows of masks, which threads lead."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import Told, make_engine, run_all, run_requests, run_steps
from patience import PATIENCE_S
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine import grammar_worker
from slipstream.engine.grammar_host import GrammarHost
from slipstream.engine.grammar_messages import Answer
from slipstream.engine.grammar_state import GrammarState
from slipstream.engine.grammar_worker import GrammarCache, GrammarWorker, _Job
from slipstream.engine.trial_queue import MAX_LONG_TRIALS, NUM_TRIAL_SLOTS, TRIAL_CHARS_PER_S, Trial, TrialQueue
from speculation_config import speculation_config

PROMPT = [70, 201, 33]
ENDLESS = SamplingParams(max_tokens=400, temperature=1.0, seed=1, guide=Guide("regex", "[a-z]{9000}"))
GUIDED = SamplingParams(max_tokens=8, temperature=1.0, seed=1, guide=Guide("regex", "[a-z]{40}"))


def _trial(length: int, arrived: float, is_long: bool = False) -> Trial:
    return Trial(f"{length} {arrived}".encode(), Guide("regex", "x" * length), arrived, is_long)


def _next(queue: TrialQueue) -> Trial:
    """The one that begins when a seat becomes free; those that run have ended before."""
    queue.running.clear()
    queue.running.extend([_trial(0, 0.0)] * (NUM_TRIAL_SLOTS - 1))
    (trial,) = queue.take()
    return trial


def test_a_long_text_waits_behind_short_ones_for_a_bounded_time() -> None:
    queue, longest = TrialQueue(), _trial(50_000, arrived=100.0)
    queue.add(longest)
    waited = 0
    for number in range(100_000):  # one more each tenth of a second, each tried before the next comes
        queue.add(_trial(10, arrived=100.0 + number / 10))
        if _next(queue) is longest:
            break
        waited += 1
    assert waited == 10 * 50_000 / TRIAL_CHARS_PER_S


def test_of_texts_that_come_together_the_short_one_is_tried_first() -> None:
    queue = TrialQueue()
    for length in (900, 20, 3000, 1):
        queue.add(_trial(length, arrived=5.0))
    assert [len(_next(queue).guide.text) for _ in range(4)] == [1, 20, 900, 3000]


def test_costly_texts_keep_no_other_waiting_and_only_so_many_wait() -> None:
    queue = TrialQueue()
    accepted = [queue.add(_trial(10, arrived=number, is_long=True)) for number in range(MAX_LONG_TRIALS + 1)]
    assert accepted == [True] * MAX_LONG_TRIALS + [False]
    for trial in queue.take():
        queue.running.append(trial)
    assert len(queue.running) == NUM_TRIAL_SLOTS and not queue.add(_trial(10, 99.0, is_long=True))
    queue.add(_trial(10, arrived=99.0))
    assert [trial.is_long for trial in queue.take()] == [False]
    (running,) = queue.remove(queue.running[0].key)
    assert running not in queue.running and queue.add(_trial(10, 99.0, is_long=True))


def test_the_most_urgent_gets_the_next_rows_of_masks(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 1})  # rows for two sequences
    try:
        told: dict[Request, Told] = {}
        for params in (GUIDED, replace(ENDLESS, max_tokens=1)):  # both grammars are known then
            engine.submit(Request(list(PROMPT), params))
            run_steps(engine, told)
        for handle in (1, 2):
            engine.submit(Request(list(PROMPT), ENDLESS, handle=handle))
        run_steps(engine, told, 10)
        later = [engine.submit(Request(list(PROMPT), GUIDED, priority=priority))[0] for priority in (3, 2, -5, 1)]
        run_steps(engine, told, 10)
        engine.cancel(1)
        run_steps(engine, told, 50)
        engine.cancel(2)
        run_steps(engine, told)
        ended = [request.priority for request in told if request in later]
        assert ended == [-5, 1, 2, 3]
    finally:
        engine.close()


def test_a_worker_remembers_no_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that the kernel gives to another thread later would end that one, too."""
    ours, theirs = socket.socketpair()
    masks = os.memfd_create("masks")
    os.truncate(masks, 4096)
    worker = GrammarWorker(theirs, masks, 1, GrammarCache(None, 0))  # type: ignore[arg-type]
    runs, may_end = threading.Event(), threading.Event()

    def advance(sequence_id: int) -> Answer:
        runs.set()
        assert may_end.wait(PATIENCE_S)
        return Answer()

    monkeypatch.setattr(worker, "_advance", advance)
    monkeypatch.setattr(grammar_worker, "_SLOW_S", -1.0)

    def size() -> int:
        return sum(len(value) for value in vars(worker).values() if isinstance(value, dict | set | list))

    before = size()
    priorities = []
    for number in range(5):
        thread = threading.Thread(target=worker._do, args=(_Job("advance", number, (), is_slow=False),))
        thread.start()
        assert runs.wait(PATIENCE_S)
        worker._demote()
        priorities.append(os.getpriority(os.PRIO_PROCESS, thread.native_id or 0))
        may_end.set()
        thread.join()
        runs.clear()
        may_end.clear()
    assert priorities == [10] * 5 and size() == before
    ours.close()
    theirs.close()
    os.close(masks)


def test_drafts_are_not_charged_to_the_limit_of_the_text(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching 40 tokens takes no time, and each walk over drafts 0.3 s of the 1 s that the whole text may take."""
    limits = StructuredOutputConfig(max_request_ms=1000)
    speculation = speculation_config("ngram", ngram_min=1, throttle="off")
    engine = make_engine(tiny_llama, speculation=speculation, structured_output=limits)
    handle_answer = GrammarHost._handle_answer

    def answered(host: GrammarHost, state: GrammarState, answer: Answer) -> None:
        handle_answer(host, state, answer._replace(cpu_s=0.3 if state.wants_walk and state.is_ready else 0.0))

    monkeypatch.setattr(GrammarHost, "_handle_answer", answered)
    params = replace(GUIDED, max_tokens=60, temperature=0.0)
    try:
        [plain] = run_all(engine, [PROMPT], replace(params, num_draft_tokens=0))
        wrong = [token_id if index % 4 else 5 for index, token_id in enumerate(plain.token_ids)]
        drafting = replace(params, reference_ids=(*PROMPT, *wrong))
        [request] = run_requests(engine, [PROMPT], drafting)
        assert (request.error, request.output_token_ids) == ("", plain.token_ids)
        assert request.num_drafted_tokens > 0 and request.speculation is None, "no more drafts than the limit pays for"
    finally:
        engine.close()


def test_drafts_of_a_slow_grammar_are_not_walked(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the tenth on a token takes 10 ms: a walk over a tree could take longer than guided_max_step_ms and end the
    request."""
    engine = make_engine(tiny_llama, speculation=speculation_config("ngram", ngram_min=1, throttle="off"))
    handle_answer = GrammarHost._handle_answer

    def answered(host: GrammarHost, state: GrammarState, answer: Answer) -> None:
        assert not (state.wants_walk and state.is_slow), "a walk"
        handle_answer(host, state, answer._replace(cpu_s=0.01 if len(state.token_ids) >= 10 else 0.0))

    monkeypatch.setattr(GrammarHost, "_handle_answer", answered)
    params = replace(GUIDED, max_tokens=60, temperature=0.0)
    try:
        [plain] = run_all(engine, [PROMPT], replace(params, num_draft_tokens=0))
        drafting = replace(params, reference_ids=(*PROMPT, *plain.token_ids))
        [request] = run_requests(engine, [PROMPT], drafting)
        assert (request.error, request.output_token_ids) == ("", plain.token_ids)
        assert 0 < request.num_accepted_tokens < request.num_drafted_tokens < 30, "drafts until then"
    finally:
        engine.close()
