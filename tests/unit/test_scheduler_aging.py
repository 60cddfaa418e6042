"""core/queue_order.py: no request starves, whoever else arrives; the order among equals stays that of arrival."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from unittest.mock import PropertyMock, patch

import pytest
from fake_llm import FakeLLM, check_blocks, continuation, make_llm, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.queue_order import MAX_AGED_LEVELS, ExpiryQueue, next_key
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.scheduler import Scheduler

_prompts = itertools.count(1000)


def distinct(max_tokens: int, priority: int) -> Request:
    """A request that shares no prefix with another, so that only the order decides when it starts."""
    return make_request([next(_prompts)] * 3, max_tokens, priority)


class ClockedLLM:
    """A fake model whose steps take `step_s`, and in which order its requests were started."""

    def __init__(self, llm: FakeLLM, step_s: float = 1.0) -> None:
        self.llm, self.step_s, self.now = llm, step_s, 0.0
        self.arrivals: dict[int, float] = {}
        self.started: list[Request] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.llm.scheduler.add(request, self.now)
            self.arrivals[request.sequence_id] = self.now

    def step(self) -> None:
        self.llm.step()
        known = {request.sequence_id for request in self.started}
        rows = self.llm.steps[-1].rows
        self.started += [row.request for row in rows if row.request.sequence_id not in known]
        self.now += self.step_s


@pytest.mark.parametrize("priority", [1, 4, 9])
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_a_low_priority_starts_within_its_bound_under_endless_high_ones(priority: int, policy: str) -> None:
    aging_s, max_tokens, max_num_seqs = 5.0, 3, 2
    llm = ClockedLLM(make_llm(max_num_seqs=max_num_seqs, priority_aging_s=aging_s, policy=policy))
    llm.add(*(distinct(max_tokens, 0) for _ in range(4)))
    llm.step()
    llm.add(low := distinct(max_tokens, priority))
    arrival = llm.now
    # before it: those that wait already and those that come while it ages; each takes a seat for max_tokens steps
    num_before = llm.llm.scheduler.num_waiting + priority * aging_s
    bound = arrival + (num_before + max_num_seqs) * max_tokens / max_num_seqs
    while low not in llm.started:
        assert llm.now <= bound, "starved"
        llm.add(distinct(max_tokens, 0))  # more than can be served
        llm.step()
    overtakers = [request for request in llm.started if llm.arrivals[request.sequence_id] > arrival]
    assert all(llm.arrivals[request.sequence_id] <= arrival + priority * aging_s for request in overtakers)


def test_without_ageing_the_lowest_is_never_served() -> None:
    llm = ClockedLLM(make_llm(max_num_seqs=1, priority_aging_s=0))
    llm.add(low := distinct(2, 1), distinct(2, 0))
    for _ in range(100):
        llm.add(distinct(2, 0))
        llm.step()
    assert low.status is RequestStatus.WAITING


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 9)), min_size=2, max_size=60),
    aging_s=st.sampled_from([0.5, 2.0, 7.0]),
    max_num_seqs=st.integers(1, 4),
)
def test_who_overtakes_whom(arrivals: list[tuple[int, int]], aging_s: float, max_num_seqs: int) -> None:
    """One that waits is overtaken only by those whose levels outweigh their later arrival; equals never overtake."""
    llm = ClockedLLM(make_llm(max_num_seqs=max_num_seqs, priority_aging_s=aging_s))
    for pause, priority in arrivals:
        for _ in range(pause):
            llm.step()
        llm.add(distinct(2, priority))
    while llm.llm.scheduler.has_work:
        llm.step()
    assert len(llm.started) == len(arrivals)
    for place, later in enumerate(llm.started):
        for earlier_in_order in llm.started[:place]:
            first, second = llm.arrivals[earlier_in_order.sequence_id], llm.arrivals[later.sequence_id]
            if second < first:  # it was there before, and waited
                levels = later.priority - earlier_in_order.priority
                assert levels > 0 and first - second <= levels * aging_s
    for priority in {request.priority for request in llm.started}:
        ids = [request.sequence_id for request in llm.started if request.priority == priority]
        assert ids == sorted(ids), "the order within one priority is that of arrival"


@pytest.mark.parametrize(("pause", "is_overtaken"), [(9.0, True), (11.0, False)])
def test_a_level_is_worth_its_seconds(pause: float, is_overtaken: bool) -> None:
    llm = ClockedLLM(make_llm(max_num_seqs=1, priority_aging_s=10.0), step_s=0.0)
    llm.add(distinct(3, 0))
    llm.step()
    llm.add(low := distinct(2, 1))
    llm.now += pause
    llm.add(urgent := distinct(2, 0))
    while llm.llm.scheduler.has_work:
        llm.step()
    assert llm.started[1:] == ([urgent, low] if is_overtaken else [low, urgent])


@pytest.mark.parametrize("aging_s", [5.0, 0.0])
def test_what_goes_on_for_a_request_has_its_place(aging_s: float) -> None:
    """A beam search is a request after another: neither does it overtake who came before it, nor is it overtaken."""
    llm = ClockedLLM(make_llm(max_num_seqs=1, priority_aging_s=aging_s))
    requests = running, early, last, late = [distinct(2, 0) for _ in range(4)]
    for llm.now, request in zip((5.0, 6.0, 10.0, 12.0), requests):
        llm.add(request)
    llm.step()
    llm.llm.scheduler.finish(last, FinishReason.CANCELLED)
    llm.llm.scheduler.add_next(following := distinct(2, 0), last)
    assert len(next_key(following.sort_key, 9)) == len(following.sort_key), "keys do not grow with a search"
    while llm.llm.scheduler.has_work:
        llm.step()
    assert llm.started == [running, early, following, late]


def test_levels_beyond_the_last_still_leave_a_bound() -> None:
    """A client may send any number; it must not be served before others for ever."""
    llm = ClockedLLM(make_llm(max_num_seqs=1, priority_aging_s=1.0))
    llm.add(distinct(2, 0))
    llm.step()
    llm.add(low := distinct(2, 2**31 - 1))
    for _ in range(3):
        llm.add(distinct(2, -(2**31)))
        llm.step()
    assert low not in llm.started
    llm.now += 2 * MAX_AGED_LEVELS
    llm.add(late := distinct(2, -(2**31)))
    while low not in llm.started:
        llm.step()
    assert late not in llm.started


def test_an_aged_request_is_not_preempted_by_a_fresh_one() -> None:
    """Blocks are short: the victim is the one that is last by priority and age, which is not the one that waited."""
    llm = ClockedLLM(make_llm(num_blocks=8, caching=False, priority_aging_s=1.0))
    low = make_request([1] * 8, 14, priority=5)
    llm.add(low)
    llm.now += 6.0
    llm.add(fresh := make_request([2] * 8, 14, priority=0))
    while llm.llm.scheduler.has_work:
        llm.step()
        check_blocks(llm.llm.scheduler)
    assert low.num_preemptions == 0 < fresh.num_preemptions
    assert fresh.output_token_ids == continuation([2] * 8, 14)


def test_a_step_looks_at_no_request_that_just_waits() -> None:
    """Whatever the length of the queue: neither the order nor deadlines are looked for among all that wait."""
    llm = ClockedLLM(make_llm(max_num_seqs=2, max_waiting_requests=500, default_max_queue_ms=60_000))
    llm.add(*(distinct(2, number % 10) for number in range(400)))
    with patch.object(Scheduler, "live_requests", PropertyMock(side_effect=AssertionError("all were looked at"))):
        for _ in range(20):
            llm.step()
            assert llm.llm.scheduler.expire(llm.now) == []
        assert len(llm.started) >= 20
        expired = llm.llm.scheduler.expire(60.0)
    assert len(expired) == 400 - len(llm.started)
    assert {output.finish_reason for output in expired} == {FinishReason.TIMEOUT}


class Payload:
    """What a client may send with a request: a table of embeddings, an adapter, a prompt of 100,000 tokens."""


def test_ended_requests_are_not_kept_until_their_deadline() -> None:
    llm = make_llm(default_max_queue_ms=60_000)
    payloads = []
    for reason in (FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.TIMEOUT):
        for request in (distinct(2, 0), distinct(2, 0)):
            request.deadline = 1.0 if reason is FinishReason.TIMEOUT else 1e9
            payload = request.prompt_rows = Payload()  # type: ignore[assignment]
            payloads.append(weakref.ref(payload))
            llm.scheduler.add(request, 0.0)
            if len(payloads) % 2:
                llm.step()
            if reason is FinishReason.CANCELLED:
                llm.scheduler.finish(request, reason)
        llm.scheduler.expire(2.0)
        llm.run()
    del request, payload
    llm.steps.clear()
    gc.collect()
    assert [payload() for payload in payloads] == [None] * 6


def test_ended_requests_leave_few_numbers_behind_until_their_deadline() -> None:
    queue = ExpiryQueue()
    queue.add(distinct(1, 0))
    assert not len(queue), "it has no deadline"
    for number in range(5000):
        request = distinct(1, 0)
        request.deadline = 1e9
        queue.add(request)
        if number % 10:
            queue.discard(request)
            queue.discard(request)
    assert len(queue) < 1100
    assert len(queue.pop(2e9)) == 500 and not len(queue)


def test_deadlines_are_met_in_order_whoever_has_ended_before() -> None:
    dice, queue, requests, ended = random.Random(3), ExpiryQueue(), [], []
    for _ in range(500):
        requests.append(request := distinct(1, 0))
        request.deadline = dice.uniform(0, 100)
        queue.add(request)
        if dice.random() < 0.5:
            ended.append(dice.choice(requests))
            queue.discard(ended[-1])
    for now in range(0, 101, 5):
        due = [one for one in requests if one not in ended and now - 5 < (one.deadline or 0) <= now]
        assert queue.pop(now) == sorted(due, key=lambda one: one.deadline or 0)


def test_a_request_that_has_started_in_time_still_has_its_deadline() -> None:
    queue, request = ExpiryQueue(), distinct(1, 0)
    request.queue_deadline, request.deadline = 1.0, 5.0
    queue.add(request)
    request.queue_deadline = None
    assert queue.pop(1.0) == queue.pop(4.9) == [] and queue.pop(5.0) == [request] and not len(queue)


def test_expiries_are_rarely_searched_for_ended_requests_where_none_ends() -> None:
    queue, num_searched = ExpiryQueue(), 0
    for _ in range(2000):
        request = distinct(1, 0)
        request.deadline = 1e9
        before = queue._heap
        queue.add(request)
        num_searched += queue._heap is not before
    assert len(queue) == 2000 and 1 <= num_searched <= 10
