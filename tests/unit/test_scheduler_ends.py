"""core/scheduler.py and core/finish.py: how requests end, by themselves, from outside and by the clock."""

from __future__ import annotations

import pytest
from fake_llm import FakeLLM, check_blocks, continuation, make_llm, make_request
from slipstream.core.config import SchedulerConfig
from slipstream.core.finish import StopConditions, end_token_ids
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler


def add(llm: FakeLLM, *requests: Request) -> None:
    for request in requests:
        llm.scheduler.add(request)


# ---- the end


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason", "stop_reason"),
    [
        ({}, 12, FinishReason.LENGTH, None),
        ({"eos": 5}, 6, FinishReason.STOP, None),
        ({"eos": 5, "ignore_eos": True}, 12, FinishReason.LENGTH, None),
        ({"eos": 5, "min_tokens": 6}, 6, FinishReason.STOP, None),
        ({"eos": 5, "min_tokens": 7}, 12, FinishReason.LENGTH, None),
        ({"eos": 5, "end_id": 3}, 4, FinishReason.STOP, None),
        ({"stop": [7]}, 8, FinishReason.STOP, 7),
        ({"stop": [7], "min_tokens": 9}, 12, FinishReason.LENGTH, None),
        ({"words": [[3, 4, 5]]}, 6, FinishReason.STOP, 5),
        ({"words": [[9, 5], [1, 2]]}, 3, FinishReason.STOP, 2),
        ({"words": [[-1, 0]]}, 12, FinishReason.LENGTH, None),
        ({"stop": [11]}, 12, FinishReason.STOP, 11),
        ({"eos": 0}, 1, FinishReason.STOP, None),  # drawn by the step of the prompt, not by one of decodes alone
        ({"stop": [0]}, 1, FinishReason.STOP, 0),
    ],
)
def test_stop_conditions(
    params: dict[str, object], num_tokens: int, reason: FinishReason, stop_reason: int | None
) -> None:
    """Token numbers in `params` are positions in the output; -1 is the prompt's last token."""
    text = continuation([1, 2, 3], 12)
    assert len(set(text)) == 12, "the fake text must not repeat a token"
    tokens = dict(
        enumerate(text),
    ) | {-1: 3}
    named = {key: value for key, value in params.items() if key in ("ignore_eos", "min_tokens")}
    if "end_id" in params:
        named["end_id"] = tokens[params["end_id"]]  # type: ignore[index]
    stop_ids = tuple(tokens[index] for index in params.get("stop", []))  # type: ignore[attr-defined]
    words = tuple(tuple(tokens[index] for index in word) for word in params.get("words", []))  # type: ignore[attr-defined]
    for num_drafts, num_right in ((0, 0), (3, 3), (3, 1)):
        llm = make_llm()
        llm.num_drafts, llm.num_right = num_drafts, num_right
        request = make_request([1, 2, 3], 12, stop_token_ids=stop_ids, stop_words_ids=words, **named)
        if "eos" in params:
            request.eos_token_ids = frozenset([tokens[params["eos"]]])  # type: ignore[index]
        add(llm, request)
        llm.run()
        assert request.output_token_ids == text[:num_tokens] == llm.emitted[request.sequence_id]
        expected = tokens[stop_reason] if stop_reason is not None else None
        assert (request.finish_reason, request.stop_reason) == (reason, expected)
        assert llm.scheduler.cache.num_used_blocks == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {2, 7}),
        ({"end_id": 5}, {5}),
        ({"end_id": 0}, {0}),
        ({"end_id": -1}, set()),
        ({"ignore_eos": True, "end_id": 5}, set()),
    ],
)
def test_end_tokens_never_are_negative(params: dict[str, object], expected: set[int]) -> None:
    request = make_request([1, 2, 3], 12, **params)
    request.eos_token_ids = frozenset({2, 7})
    assert end_token_ids(request) == StopConditions(request, 100).token_ids == expected


def test_max_model_len_ends_a_sequence_with_length() -> None:
    llm = make_llm(max_model_len=10)
    request = make_request(7, 50)
    add(llm, request)
    llm.run()
    assert (request.num_tokens, request.finish_reason) == (10, FinishReason.LENGTH)


def test_finish_frees_at_once_answers_once_and_works_in_every_state() -> None:
    llm = make_llm(max_num_seqs=1, max_num_batched_tokens=8)
    running, waiting, unknown = make_request(20), make_request(6), make_request(4)
    add(llm, running, waiting)
    llm.step()
    for request in (running, waiting, unknown):
        output = llm.scheduler.finish(request, FinishReason.ERROR, error="it broke")
        assert output is not None and output.new_token_ids == []
        assert (output.finish_reason, output.error) == (FinishReason.ERROR, "it broke")
        assert llm.scheduler.finish(request, FinishReason.CANCELLED) is None
        assert request.finish_reason is FinishReason.ERROR
        check_blocks(llm.scheduler)
    assert llm.scheduler.cache.num_used_blocks == 0 and not llm.scheduler.has_work


def test_a_request_finished_between_schedule_and_commit_gets_no_more_news() -> None:
    llm = make_llm()
    request = make_request(5)
    add(llm, request)
    step = llm.scheduler.schedule()
    llm.scheduler.finish(request, FinishReason.STOP, "a stop string")
    assert not llm.scheduler.commit(step, [[7]])
    assert request.num_output_tokens == 0 and request.stop_reason == "a stop string"


# ---- time


def test_deadlines_hold_while_waiting_and_while_running() -> None:
    llm = make_llm(max_num_seqs=1)
    running, waiting, patient = make_request(5, 50), make_request(6), make_request(7)
    running.deadline, waiting.deadline = 20.0, 10.0
    add(llm, running, waiting, patient)
    llm.step()
    assert llm.scheduler.expire(9.9) == []
    assert [output.request for output in llm.scheduler.expire(10.0)] == [waiting]
    assert [(o.request, o.finish_reason) for o in llm.scheduler.expire(25.0)] == [(running, FinishReason.TIMEOUT)]
    llm.run()
    assert patient.finish_reason is FinishReason.LENGTH


def test_the_queue_time_out_is_over_once_a_request_has_started() -> None:
    llm = make_llm(max_num_seqs=1, default_max_queue_ms=500)
    started, queued = make_request(5, 50), make_request(6)
    llm.scheduler.add(started, now=100.0)
    llm.scheduler.add(queued, now=100.0)
    llm.step()
    assert llm.scheduler.expire(100.4) == []
    assert [output.request for output in llm.scheduler.expire(100.6)] == [queued]
    assert llm.scheduler.expire(1e9) == [] and not started.is_finished


def test_the_block_that_a_last_token_fills_is_found_by_others() -> None:
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(16, 4), 64)
    request = Request([1, 1, 1], SamplingParams(max_tokens=2))
    scheduler.add(request)
    for token_id in (7, 8):
        scheduler.commit(scheduler.schedule(), [[token_id]])
    assert request.is_finished
    assert len(scheduler.cache.find_prefix(Request([1, 1, 1, 7, 9], SamplingParams()))) == 1
