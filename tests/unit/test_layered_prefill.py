"""core/layered_prefill.py: chunks that are too long for a step of decodes go through some layers in each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_llm import FakeLLM, continuation, make_llm, make_request
from slipstream.core.config import SchedulerConfig
from slipstream.core.layered_prefill import REST, LayeredChunk, LayeredPrefill
from slipstream.core.outputs import StepOutput
from slipstream.core.prefill_budget import MIN_CHUNK, PrefillBudget, StepPace
from slipstream.core.request import FinishReason, Request
from slipstream.core.step import ScheduledStep

PARITY, NUM_LAYERS = 1000.0, 8


def begin(budget: PrefillBudget, num_decodes: int = 3) -> ScheduledStep:
    step = ScheduledStep(requests=[make_request(3) for _ in range(num_decodes)])
    budget.begin_step(step)
    return step


def behind(num_computed: int, num_tokens: int = 10_000) -> Request:
    request = make_request(num_tokens)
    request.num_computed_tokens = num_computed
    return request


def budget_of(limit: float) -> PrefillBudget:
    """A budget of `limit` weighted tokens a step."""
    budget = PrefillBudget(4096, PARITY, layered=LayeredPrefill(NUM_LAYERS))
    budget._limit = limit
    return budget


def test_layers_that_fit_are_taken_until_the_chunk_is_through() -> None:
    budget, request = budget_of(400.0), behind(9000)  # 128 tokens weigh 1,280
    found = []
    for _ in range(4):
        step = begin(budget)
        assert budget.take_layers(request, 1000, 4096)
        assert budget.take(0, 5000, 4096) == 0  # nobody else gets anything
        found.append(step.layered)
        assert step.prefill_weight == pytest.approx(1280 * (step.layered.end_layer - step.layered.first_layer) / 8)
    assert found == [LayeredChunk(request, 9000, MIN_CHUNK, layer, layer + 2) for layer in (0, 2, 4, 6)]
    assert request.num_computed_tokens == 9000 + MIN_CHUNK
    assert begin(budget) and budget.take_layers(request, 1000 - MIN_CHUNK, 4096)
    assert budget._step.layered.first_layer == 0 and budget._step.layered.first_token == 9000 + MIN_CHUNK


def test_steps_of_a_chunk_share_its_layers() -> None:
    """31 of 32 fit: two steps take 16 each, not all but one."""
    layered, request = LayeredPrefill(32), behind(3000)
    chunks = [layered.next(request, 128, 4.0, most=31.5 * 16) for _ in range(2)]
    assert [(chunk.first_layer, chunk.end_layer) for chunk in chunks] == [(0, 16), (16, 32)]


def test_one_layer_fits_always() -> None:
    budget = budget_of(1.0)
    step = begin(budget)
    assert budget.take_layers(behind(9000), 1000, 4096)
    assert (step.layered.first_layer, step.layered.end_layer) == (0, 1)


@pytest.mark.parametrize(
    ("limit", "num_computed", "num_missing", "num_decodes"),
    [(1300.0, 9000, 1000, 3), (400.0, 9000, 2 * REST, 3), (400.0, 9000, 1000, 0), (400.0, 0, 1000, 3)],
    ids=["it fits", "the last tokens", "no decodes", "no context"],
)
def test_other_chunks_are_whole(limit: float, num_computed: int, num_missing: int, num_decodes: int) -> None:
    budget = budget_of(limit)
    step = begin(budget, num_decodes)
    assert not budget.take_layers(behind(num_computed), num_missing, 4096)
    assert step.layered is None and budget.take(num_computed, num_missing, 4096) >= min(num_missing, MIN_CHUNK)


@pytest.mark.parametrize(
    ("num_missing", "expected"),
    [
        (2 * REST + 1, REST + 1),
        (MIN_CHUNK + REST, MIN_CHUNK),
        (MIN_CHUNK + REST + 3, 66),
        (2 * MIN_CHUNK + REST, MIN_CHUNK),
    ],
)
def test_a_rest_is_left_and_the_last_two_share(num_missing: int, expected: int) -> None:
    budget, request = budget_of(400.0), behind(9000)
    step = begin(budget)
    assert budget.take_layers(request, num_missing, 4096)
    assert step.layered.num_tokens == expected


def with_prompt_logprobs(request: Request) -> None:
    request.params = replace(request.params, prompt_logprobs=1)


def with_embeddings(request: Request) -> None:
    request.prompt_rows = object()  # type: ignore[assignment]


@pytest.mark.parametrize("change", [with_prompt_logprobs, with_embeddings])
def test_requests_with_more_than_tokens_have_whole_chunks(change: Callable[[Request], None]) -> None:
    request = behind(9000)
    budget = budget_of(400.0)
    begin(budget)
    change(request)
    assert not budget.take_layers(request, 1000, 4096)


def lose_blocks(request: Request) -> None:
    request.note_preempted()
    request.num_computed_tokens = 9000  # the same prefix was found again, in other blocks


def go_on(request: Request) -> None:
    request.num_computed_tokens += 40


@pytest.mark.parametrize("change", [lose_blocks, go_on])
def test_a_chunk_of_another_state_begins_again(change: Callable[[Request], None]) -> None:
    budget, request = budget_of(400.0), behind(9000)
    begin(budget)
    assert budget.take_layers(request, 1000, 4096)
    change(request)
    step = begin(budget)
    assert budget.take_layers(request, 1000, 4096)
    assert (step.layered.first_token, step.layered.first_layer) == (request.num_computed_tokens, 0)


def test_another_request_begins_its_own() -> None:
    budget, request, other = budget_of(400.0), behind(9000), behind(9000)
    for place, (one, layer) in enumerate([(request, 0), (other, 0), (other, 2), (request, 0)]):
        step = begin(budget)
        assert budget.take_layers(one, 1000, 4096)
        assert (step.layered.request, step.layered.first_layer) == (one, layer), place


def test_without_layers_there_are_none() -> None:
    budget = PrefillBudget.of(SchedulerConfig(max_mixed_prefill_tokens=200), PARITY)
    begin(budget)
    assert not budget.take_layers(behind(90_000), 1000, 4096)


def test_what_is_underway_goes_on_first() -> None:
    """Even if a whole chunk would fit by now, and not behind a chunk of another prompt."""
    budget, request = budget_of(400.0), behind(9000)
    begin(budget)
    assert budget.take_layers(request, 1000, 4096)
    step = begin(budget)
    assert budget.take(0, 100, 4096) == 100  # a more urgent one's
    assert budget.take_layers(request, 1000, 4096) and step.layered is None
    budget._limit = 4096.0
    step = begin(budget)
    assert budget.take_layers(request, 1000, 4096)
    assert (step.layered.first_layer, step.layered.end_layer) == (2, NUM_LAYERS)


@pytest.mark.parametrize(
    ("num_decodes", "num_left", "is_quiet"),
    [(0, 4096, False), (3, 0, False), (3, 4096, True)],
    ids=["no decodes wait for it", "decodes take all tokens", "decodes are to be measured alone"],
)
def test_what_is_underway_takes_no_layers(num_decodes: int, num_left: int, is_quiet: bool) -> None:
    budget, request = paced(0.01), behind(9000)
    begin(budget)
    assert budget.take_layers(request, 1000, 4096)
    if is_quiet:
        budget._pace.forget_quiet()
    step = begin(budget, num_decodes)
    assert not budget.take_layers(request, 1000, num_left) and step.layered is None
    assert budget.take(9000, 1000, num_left) == (0 if num_decodes else 1000)


def test_a_chunk_is_no_longer_than_what_is_left_of_the_step() -> None:
    budget = budget_of(40.0)
    step = begin(budget)
    assert budget.take_layers(behind(9000), 1000, 16)
    assert step.layered.num_tokens == 16


def paced(max_step_s: float) -> PrefillBudget:
    """In which decodes alone take longer than the step may."""
    pace = StepPace(max_step_s)
    for _ in range(5):
        pace.note(0.0, True, 0.05)
        pace.note(1000.0, True, 0.1)
    return PrefillBudget(4096, PARITY, pace, layered=LayeredPrefill(32))


def test_short_contexts_keep_the_least_chunk() -> None:
    budget = paced(0.01)
    begin(budget)
    assert not budget.take_layers(behind(PARITY // 4 - 1), 1000, 4096)
    assert [budget.take(0, 8, 4096) for _ in range(20)] == [8] * 16 + [0] * 4


@pytest.mark.parametrize(("max_step_s", "expected"), [(0.01, 1), (0.0, 4)])
def test_a_bound_that_is_set_holds_and_another_leaves_an_eighth(max_step_s: float, expected: int) -> None:
    budget = paced(max_step_s)
    for _ in range(15):
        budget._pace.note(0.0, True, 0.001)
        budget._pace.note(1.0, True, 5.0, is_layered=True)
    step = begin(budget)
    assert budget.take_layers(behind(9000), 1000, 4096)
    assert step.layered.end_layer == expected


def test_layers_that_are_cheap_become_more() -> None:
    """A layer beside 7 ms of decodes takes half a millisecond: 10 ms have room for six, though a step with one takes
    three quarters of its time."""
    budget, request, taken = paced(0.01), behind(9000), []
    for _ in range(40):
        budget._pace.note(0.0, True, 0.007)
        step = begin(budget)
        assert budget.take_layers(request, 1000, 4096)
        taken.append(step.layered.end_layer - step.layered.first_layer)
        budget._pace.note(step.prefill_weight, True, 0.007 + 0.0005 * taken[-1], is_layered=True)
    assert taken[0] == 1 and 5 <= max(taken[20:]) <= 6


@pytest.mark.parametrize(
    ("max_step_s", "num_cached", "is_whole"),
    [(0.06, 3000, False), (0.0, 3000, True), (0.06, 100, True), (1.0, 3000, True)],
)
def test_a_prompt_begins_with_a_token_where_a_chunk_would_pass_a_bound(
    max_step_s: float, num_cached: int, is_whole: bool
) -> None:
    budget, other = paced(max_step_s), paced(max_step_s)
    begin(budget), begin(other)
    whole = other.take(num_cached, 1000, 4096)
    assert whole >= 128 and budget.take_first(behind(0), num_cached, 1000, 4096) == (whole if is_whole else 1)


def test_decodes_are_measured_soon_where_nothing_fits() -> None:
    pace = paced(0.01)._pace
    for _ in range(8):
        pace.note(100.0, True, 0.1, is_layered=True)
    assert not pace.is_quiet_due(1000.0) and pace.is_quiet_due(5.0) and not pace.is_quiet_due(5.0)


class TimedLLM:
    """The fake model with a clock: 10 ms for decodes, 20 us for a weighted token."""

    def __init__(self, max_step_s: float, num_ahead: int = 0, num_blocks: int = 3000) -> None:
        self.llm = make_llm(max_num_batched_tokens=600, num_blocks=num_blocks, max_model_len=9000)
        self.llm.num_ahead = num_ahead
        self.now, self.seconds = 0.0, []
        pace = StepPace(max_step_s)
        self.budget = PrefillBudget(600, PARITY, pace, clock=lambda: self.now, layered=LayeredPrefill(NUM_LAYERS))
        self.llm.scheduler.prefill_budget = self.budget
        commit = self.llm.scheduler.commit

        def slow_commit(step: ScheduledStep, sampled: list[list[int]]) -> list[StepOutput]:
            self.seconds.append((0.01 if step.num_decodes else 0.0) + 20e-6 * step.prefill_weight)
            self.now += self.seconds[-1]
            return commit(step, sampled)

        self.llm.scheduler.commit = slow_commit  # type: ignore[method-assign]


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_steps_keep_a_bound_that_no_chunk_would(num_ahead: int) -> None:
    """128 tokens behind 7,000 others take 20 ms; the bound leaves 4 to prompts."""
    timed = TimedLLM(0.014, num_ahead)
    llm = timed.llm
    llm.scheduler.add(stream := make_request(3, 5000))
    for _ in range(4):
        llm.step()
    llm.scheduler.add(prompt := make_request(7000, 4))
    for _ in range(40):  # the first steps learn what a token takes
        llm.step()
    begin_step = len(timed.seconds)
    while prompt.num_output_tokens == 0:
        llm.step()
    assert math.isclose(max(timed.seconds[begin_step:]), 0.014, rel_tol=0.25)
    assert sum(step.layered is not None for step in llm.steps) > 100
    assert llm.emitted[prompt.sequence_id] == continuation(prompt.prompt_token_ids, prompt.num_output_tokens)
    assert all(stream in step.requests for step in llm.steps[2:])
    llm.scheduler.finish(stream, FinishReason.CANCELLED)
    llm.run()


def test_what_layers_have_computed_is_shared() -> None:
    """A prompt that is cancelled, or another with the same beginning, finds its blocks."""
    llm = TimedLLM(0.012).llm
    llm.scheduler.add(make_request(3, 3000))
    for _ in range(4):
        llm.step()
    llm.scheduler.add(prompt := make_request(4000, 4))
    while prompt.num_computed_tokens < 3000:
        llm.step()
    llm.step()
    computed, size = prompt.num_computed_tokens, llm.scheduler.cache.block_size
    llm.scheduler.finish(prompt, FinishReason.CANCELLED)
    llm._next_layer = None
    llm.scheduler.add(again := Request(list(prompt.prompt_token_ids), prompt.params))
    while again.num_output_tokens == 0:
        llm.step()
    assert computed - size < again.num_cached_tokens <= computed
    assert llm.emitted[again.sequence_id] == continuation(again.prompt_token_ids, again.num_output_tokens)


def test_a_prompt_may_be_cancelled_between_two_layers() -> None:
    num_cut = 0
    for num_steps in range(60, 70):
        llm: FakeLLM = TimedLLM(0.012).llm
        llm.scheduler.add(make_request(3, 300))
        for _ in range(4):
            llm.step()
        llm.scheduler.add(prompt := make_request(4000, 4))
        for _ in range(num_steps):
            llm.step()
        num_cut += llm._next_layer is not None
        llm.scheduler.finish(prompt, FinishReason.CANCELLED)
        llm._next_layer = None
        llm.scheduler.add(other := make_request(4000, 4))  # begins at its first layer
        llm.run()
        assert llm.emitted[other.sequence_id] == continuation(other.prompt_token_ids, 4)
        assert llm.scheduler.cache.num_used_blocks == 0
    assert num_cut > 5
