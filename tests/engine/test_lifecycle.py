"""Requests that come, wait, are cancelled, time out, fail; an engine that dies answers everybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, Told, make_engine, model_worker, run_all, run_steps
from patience import PATIENCE_S
from slipstream.core.errors import CapacityError, EngineError, RequestError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.core.stats import Metric
from slipstream.engine.engine import Engine
from slipstream.engine.grammar_host import GrammarHost
from slipstream.engine.grammar_messages import Answer
from slipstream.engine.inbox import MAX_MESSAGES, Finish, ended_by

LONG = replace(GREEDY, max_tokens=200)


def _request(handle: int = 0, params: SamplingParams = LONG, num_prompt_tokens: int = 20, **fields: object) -> Request:
    prompt = [3 + (7 * handle + i) % 400 for i in range(num_prompt_tokens)]
    return Request(prompt, params, handle=handle, **fields)  # type: ignore[arg-type]


def test_cancel_frees_blocks_within_two_steps(engine: Engine) -> None:
    cache = engine.scheduler.cache
    told: dict[Request, Told] = {}
    sequences = engine.submit(_request(1, replace(LONG, n=3)))
    (other,) = engine.submit(_request(2))
    run_steps(engine, told, 10)
    assert cache.num_used_blocks > 0 and len(told) == 4
    engine.cancel(1)
    run_steps(engine, told, 2)
    assert [told[sequence].finish_reason for sequence in sequences] == [FinishReason.CANCELLED] * 3
    assert cache.leaked_blocks(engine.scheduler.live_requests) == 0
    assert cache.num_used_blocks == len(other.block_ids)
    run_steps(engine, told)
    assert told[other].finish_reason is FinishReason.LENGTH and len(told[other].token_ids) == 200


def test_cancel_of_waiting_unknown_and_finished(engine: Engine) -> None:
    told: dict[Request, Told] = {}
    engine.cancel(404)
    (waiting,) = engine.submit(_request(1))
    engine.cancel(1)
    run_steps(engine, told)
    assert told[waiting].finish_reason is FinishReason.CANCELLED and told[waiting].token_ids == []
    engine.cancel(1)
    engine.finish(waiting)
    run_steps(engine, told)
    assert not engine.has_work and engine.scheduler.cache.num_used_blocks == 0


def test_clients_who_leave_at_once_cost_others_little(tiny_llama: Path) -> None:
    """A step reads so many messages and looks at each live request once; the next one reads on."""
    engine = make_engine(tiny_llama, {"load_format": "null"}, scheduler={"max_waiting_requests": 3000})
    looked, num = 0, 2 * MAX_MESSAGES + 100
    requests = [engine.submit(Request([5, 6, 7], GREEDY, handle=number))[0] for number in range(1, num + 1)]
    for number in range(101, num + 1):
        engine.cancel(number)
    engine.finish(requests[0])

    class Watched(list[Request]):
        def __iter__(self) -> Iterator[Request]:
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    while engine.scheduler.num_waiting + len(engine.scheduler._running) < num - 100:
        engine.step()
    engine.scheduler._waiting = Watched(engine.scheduler._waiting)
    ended = [output.request for output in engine.step() if output.finish_reason is FinishReason.CANCELLED]
    assert 0 < len(ended) <= MAX_MESSAGES and looked < 3 * num
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert [request.finish_reason for request in requests[100:]] == [FinishReason.CANCELLED] * (num - 100)
    assert requests[0].finish_reason is FinishReason.STOP and requests[1].finish_reason is FinishReason.LENGTH


def test_the_first_message_of_a_sequence_counts_and_its_own_before_its_requests() -> None:
    first, second, other = _request(1), _request(1), _request(2)
    stop, late = Finish(first, FinishReason.STOP, "END"), Finish(first, FinishReason.TIMEOUT)
    cancel, again = Finish(1, FinishReason.CANCELLED), Finish(1, FinishReason.ERROR)
    unknown = [Finish(_request(1), FinishReason.STOP), Finish(3, FinishReason.CANCELLED)]
    for messages in ([cancel, stop, again, late, *unknown], [stop, cancel, late, again, *unknown]):
        assert ended_by(messages, [first, other, second]) == [(first, stop), (second, cancel)]


def test_a_request_that_finds_no_place_any_more_fails_with_all_its_sequences(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(requests: list[Request]) -> None:
        raise CapacityError("no place")

    (other,) = engine.submit(_request(1))
    told: dict[Request, Told] = {}
    run_steps(engine, told, 2)
    with monkeypatch.context() as patches:
        patches.setattr(engine.scheduler, "add_all", refuse)
        sequences = engine.submit(_request(2, replace(LONG, n=3)))
        run_steps(engine, told, 1)
    assert [(told[one].error, told[one].fault) for one in sequences] == [("no place", CapacityError)] * 3
    run_steps(engine, told)
    assert len(told[other].token_ids) == 200 and engine.error is None


def test_finish_ends_one_sequence_only(engine: Engine) -> None:
    told: dict[Request, Told] = {}
    first, second = engine.submit(_request(1, replace(LONG, n=2)))
    run_steps(engine, told, 5)
    engine.finish(first, "a stop string")
    run_steps(engine, told)
    assert told[first].finish_reason is FinishReason.STOP and first.stop_reason == "a stop string"
    assert len(told[first].token_ids) < 10 and len(told[second].token_ids) == 200


def test_deadline_and_queue_timeout(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on when the test says so."""
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 1, "default_max_queue_ms": 1000})
    clock, expire = [time.monotonic()], engine.scheduler.expire
    monkeypatch.setattr(engine.scheduler, "expire", lambda now: expire(clock[0]))
    told: dict[Request, Told] = {}
    (late,) = engine.submit(_request(1, deadline=clock[0] + 2000))
    (queued,) = engine.submit(_request(2))
    run_steps(engine, told, 5)
    assert told[late].token_ids and queued not in told
    clock[0] += 1000  # seconds; one is the limit of the queue
    run_steps(engine, told, 5)
    assert told[queued].finish_reason is FinishReason.TIMEOUT and told[queued].token_ids == []
    assert told[late].finish_reason is None
    clock[0] += 1001
    run_steps(engine, told)
    assert told[late].finish_reason is FinishReason.TIMEOUT and 0 < len(told[late].token_ids) < 20


def test_cancelled_prompt_logprobs_leave_nothing(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, scheduler={"max_num_batched_tokens": 8})
    engine.submit(_request(1, replace(GREEDY, prompt_logprobs=1)))
    run_steps(engine, {}, 2)
    kept = model_worker(engine).runner._prompt_logprobs._entries
    assert kept
    engine.cancel(1)
    run_steps(engine, {})
    assert not kept


def test_priority_runs_first(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 1})
    requests = [_request(i, replace(GREEDY, max_tokens=3), priority=p) for i, p in enumerate((5, 0, -3, 0))]
    for request in requests:
        engine.submit(request)
    order = []
    while engine.has_work:
        order += [output.request.handle for output in engine.step() if output.finish_reason is not None]
    assert order == [2, 1, 3, 0]


def test_admission_limit(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 2, "max_waiting_requests": 3})
    for handle in range(5):
        engine.submit(_request(handle))
    with pytest.raises(CapacityError, match="max_waiting_requests=3"):
        engine.submit(_request(9))
    run_steps(engine, {}, 1)
    with pytest.raises(CapacityError):
        engine.submit(_request(9))
    engine.cancel(0)
    engine.cancel(1)
    run_steps(engine, {}, 1)
    with pytest.raises(CapacityError):
        engine.submit(_request(9, replace(LONG, n=3)))
    engine.submit(_request(9))
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert engine.scheduler.cache.num_used_blocks == 0
    with pytest.raises(RequestError, match="got 6, accepted: at most 5, max_num_seqs and max_waiting_requests"):
        engine.submit(_request(9, replace(LONG, n=6)))  # the same request cannot succeed later


def test_requests_that_can_never_run(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, model={"max_model_len": 64})
    with pytest.raises(RequestError, match="max_model_len=64") as caught:
        engine.submit(_request(1, num_prompt_tokens=64))
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match="prompt"):
        engine.submit(_request(1, num_prompt_tokens=0))
    with pytest.raises(RequestError, match="not in the vocabulary"):
        engine.submit(Request([5, 10**9], GREEDY))
    assert not engine.has_work
    assert run_all(engine, [[7] * 63], GREEDY)[0].finish_reason is FinishReason.LENGTH


def test_failure_of_one_request_is_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose matcher fails at its third token."""
    take_answer = GrammarHost._take_answer

    def fail_third(host: GrammarHost, state_id: int, answer: Answer) -> None:
        if len(host._states[state_id].token_ids) == 2:
            answer = Answer("matcher is broken")
        take_answer(host, state_id, answer)

    monkeypatch.setattr(GrammarHost, "_take_answer", fail_third)
    expected = run_all(engine, [_request(2).prompt_token_ids], GREEDY)[0].token_ids
    told: dict[Request, Told] = {}
    (broken,) = engine.submit(_request(1, replace(GREEDY, guide=Guide("regex", "[a-z]{9}"))))
    (sound,) = engine.submit(_request(2, GREEDY))
    run_steps(engine, told)
    assert told[broken].finish_reason is FinishReason.ERROR and told[broken].error.startswith("internal error")
    assert len(told[broken].token_ids) == 2
    assert told[sound].token_ids == expected
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0


def test_dead_engine_answers_everybody(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_llama, scheduler={"max_num_seqs": 2})
    told: dict[Request, Told] = {}
    requests = [_request(handle) for handle in range(4)]
    for request in requests:
        engine.submit(request)
    run_steps(engine, told, 3)

    def explode(batch: object) -> None:
        engine.submit(last)  # arrives while the step fails
        raise ValueError("kernel went wrong")

    last = _request(5)
    monkeypatch.setattr(model_worker(engine).runner, "forward", explode)
    run_steps(engine, told, 1)
    assert isinstance(engine.error, EngineError)
    for request in [*requests, last]:
        assert told[request].finish_reason is FinishReason.ERROR, request.handle
        assert told[request].error.startswith("internal error")
    with pytest.raises(EngineError):
        engine.submit(_request(6))
    assert not engine.step() and not engine.has_work


def test_an_answer_of_before_the_death_stands(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at afterwards, as by an output thread that is behind. The step in flight has a row of its request."""
    engine = make_engine(tiny_llama, scheduler={"overlap_scheduling": "on"})
    expected = run_all(engine, [_request(1).prompt_token_ids], GREEDY)[0].token_ids
    stop = next(token_id for index, token_id in enumerate(expected) if index > 6 and token_id not in expected[:index])
    (ended,) = engine.submit(_request(1, replace(GREEDY, stop_token_ids=(stop,))))
    (running,) = engine.submit(_request(2))
    outputs = engine.step()
    while not outputs.ended():
        outputs = engine.step()
    assert outputs.ended() == [ended] and any(ended in flying.step.requests for flying in engine._in_flight)

    def explode(step_id: int) -> None:
        raise ValueError("the device is gone")

    monkeypatch.setattr(engine.worker, "result", explode)
    died = {output.request: output.finish_reason for output in engine.step()}
    assert died[running] is FinishReason.ERROR
    told = {output.request: output.finish_reason for output in outputs}
    assert told == {ended: FinishReason.STOP, running: None}


@pytest.mark.parametrize("part", ["_structured.advance", "_measure"])
def test_death_after_commit_answers_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """One request has ended in the very step that fails: its answer stands, the other's is the error."""
    engine = make_engine(tiny_llama)
    (ended,) = engine.submit(_request(1, replace(GREEDY, max_tokens=1)))
    (running,) = engine.submit(_request(2))

    def explode(*args: object) -> None:
        raise ValueError("too late")

    *path, name = part.split(".")
    monkeypatch.setattr(getattr(engine, path[0]) if path else engine, name, explode)
    outputs = engine.step()
    last = [(output.request, output.finish_reason) for output in outputs if output.finish_reason is not None]
    assert last == [(ended, FinishReason.LENGTH), (running, FinishReason.ERROR)]


def test_death_in_commit_answers_everybody(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_llama)
    requests = [engine.submit(_request(i, replace(GREEDY, max_tokens=1)))[0] for i in range(3)]
    commit = engine.scheduler.commit

    def explode(*args: object) -> None:
        commit(*args)  # type: ignore[arg-type]
        raise ValueError("broke off")

    monkeypatch.setattr(engine.scheduler, "commit", explode)
    outputs = engine.step()
    assert [(output.request, output.finish_reason) for output in outputs] == [
        (request, FinishReason.ERROR) for request in requests
    ]


def test_threads_submit_and_cancel(engine: Engine) -> None:
    """Two submitters and a canceller beside the engine thread: every request ends exactly once, nothing leaks."""
    told: dict[Request, Told] = {}
    submitted: list[Request] = []
    is_over = threading.Event()

    def submitter(first: int) -> None:
        for handle in range(first, first + 30):
            submitted.extend(engine.submit(_request(handle, replace(GREEDY, max_tokens=1 + handle % 7))))
            if handle % 5 == 0:
                engine.cancel(handle)

    def loop() -> None:
        while not is_over.is_set() or engine.has_work:
            for output in engine.step():
                told.setdefault(output.request, Told()).take(output)
            engine.wait(0.01)

    threads = [threading.Thread(target=submitter, args=(first,)) for first in (100, 200)]
    runner = threading.Thread(target=loop)
    for thread in [runner, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    runner.join(PATIENCE_S)
    assert not runner.is_alive()
    assert len(submitted) == 60 and all(told[request].finish_reason is not None for request in submitted)
    assert engine.scheduler.cache.num_used_blocks == 0


def test_wait_wakes_at_once(engine: Engine) -> None:
    timer = threading.Timer(0.05, lambda: engine.submit(_request(1, replace(GREEDY, max_tokens=1))))
    timer.start()
    start = time.monotonic()
    assert engine.wait(2 * PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S
    run_steps(engine, {})
    assert not engine.wait(0.0)


def test_numbers_reach_the_metrics(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(tiny_llama)
    run_all(engine, prompts, GREEDY)
    seen: dict[int, list[float]] = {}
    for _ in range(2):
        for metric, values in engine.stats.drain():
            seen.setdefault(metric, []).extend(values)
        engine.wait(0.0)
    assert sum(seen[Metric.GENERATION_TOKENS]) == 24 * len(prompts)
    assert sum(seen[Metric.FINISHED_LENGTH]) == len(prompts)
    assert seen[Metric.KV_BLOCKS_LEAKED][-1] == 0 and seen[Metric.KV_BLOCKS_TOTAL][-1] == 512
    assert len(seen[Metric.STEP_TIME]) >= 24 and all(0 < seconds < 60 for seconds in seen[Metric.STEP_TIME])
    assert seen[Metric.REQUESTS_RUNNING][-1] == 0


def test_an_urgent_request_does_not_wait_for_the_prefix_of_a_less_urgent_one(tiny_llama: Path) -> None:
    """Which gets no tokens while there are others of the first one's priority."""
    engine = make_engine(tiny_llama, {"max_model_len": 400}, {"num_blocks": 400}, {"max_num_batched_tokens": 40})
    text = [(7 * place) % 200 + 5 for place in range(300)]
    engine.submit(Request(list(text), GREEDY, priority=10))
    run_steps(engine, {}, 2)
    [urgent] = engine.submit(Request(text[:200], replace(GREEDY, max_tokens=1)))
    for step in range(20):
        others = [(11 * place + 13 * step) % 200 + 5 for place in range(40)]
        engine.submit(Request(others, replace(GREEDY, max_tokens=1)))
        engine.step()
    assert urgent.is_finished


def test_lengths_of_sequences_that_a_stop_string_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Metric] = []
    monkeypatch.setattr(engine.stats, "observe", lambda metric, value: seen.append(metric))
    [request] = engine.submit(_request(1))
    run_steps(engine, {}, 4)
    engine.finish(request, stop="x")
    run_steps(engine, {})
    for metric in (Metric.PREFILL_TIME, Metric.DECODE_TIME, Metric.REQUEST_PROMPT_TOKENS, Metric.E2E_TIME):
        assert seen.count(metric) == (1 if metric is not Metric.E2E_TIME or request.times.arrival_ns else 0)
    seen.clear()
    engine.submit(_request(2))
    run_steps(engine, {}, 4)
    engine.cancel(2)  # whose lengths are its client's patience
    run_steps(engine, {})
    assert Metric.E2E_TIME in seen and Metric.REQUEST_PROMPT_TOKENS not in seen
