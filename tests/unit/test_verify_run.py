"""Columns of a run of verifications: the engine finds in them what a look at each request finds."""

from __future__ import annotations

from random import Random

import pytest
from slipstream.core.config import EngineConfig, ModelConfig, SchedulerConfig
from slipstream.core.finish import StopConditions
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.speculation import Speculation
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.core.verify_run import VerifyRun
from slipstream.engine.drafting import Drafting
from slipstream.engine.in_flight import InFlightStep, alike_verifications, sampled_step
from slipstream.engine.step_inputs import StepInputs
from slipstream.worker.interface import DrafterInfo, DraftInput, StepResult

ALIKE = Speculation("ngram", 5, "exact", may_run_ahead=True)
NGRAM = DrafterInfo("ngram", 5, 0, 0, is_head=False, reads_all_rows=False, makes_chains=True)
HEAD = DrafterInfo("mtp", 2, 2, 2, is_head=True, reads_all_rows=True)


def _request(length: int, max_tokens: int = 30, num_drafts: int = 0) -> Request:
    request = Request([7] * length, SamplingParams(max_tokens=max_tokens, temperature=0.0), speculation=ALIKE)
    request.stop_conditions = StopConditions(request, 200)
    request.num_computed_tokens, request.status = length - 1, RequestStatus.RUNNING
    request.draft_token_ids = list(range(100, 100 + num_drafts))
    request.num_slots, request.num_sent_blocks = 64, 4
    request.sort_key = (0.0, request.sequence_id)
    return request


def _verification(requests: list[Request], prompts: list[Request] | None = None) -> ScheduledStep:
    """A step of a run: of requests that decode, with their drafts, and prompts behind them."""
    rows = [
        ScheduledRequest(one, one.num_computed_tokens, 1 + len(one.draft_token_ids), True, len(one.draft_token_ids))
        for one in requests
    ]
    step = ScheduledStep.of(rows)
    for request in requests:
        request.num_output_placeholders = 1
    assert VerifyRun.after(step, requests, [], KVCacheManager(64, 16)) is not None and step.verified is not None
    for prompt in prompts or ():
        step.add(prompt, 0, prompt.num_tokens, True)
    return step


def _looked(step: ScheduledStep) -> ScheduledStep:
    """The same without columns."""
    return ScheduledStep.of(step.rows)


def _result(step: ScheduledStep, dice: Random) -> tuple[StepResult, list[int]]:
    """What a device says of a step: drafts up to the first wrong one are the tokens drawn before them. Bits of rows
    that a request does not have say nothing. Returns also how many rows of each request hold."""
    drawn: list[int] = []
    masks: list[int] = []
    held: list[int] = []
    for request, num_drafts in zip(step.requests, step.num_drafts):
        count = dice.randrange(1 + num_drafts)
        drawn += [*request.draft_token_ids[:count], *(1000 + dice.randrange(50) for _ in range(1 + num_drafts - count))]
        masks.append((2 << count) - 1 | dice.choice([0, 1]) << 40)
        held.append(1 + count)
    return StepResult(drawn, masks), held


@pytest.mark.parametrize("num_prompts", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_of_a_run_are_those_of_its_requests(seed: int, num_prompts: int) -> None:
    dice = Random(seed)
    requests = [_request(5 + index, num_drafts=dice.randrange(6)) for index in range(8)]
    requests[3].draft_token_ids = [100, 101, 102]
    step = _verification(requests, [_request(9) for _ in range(num_prompts)])
    result, held = _result(step, dice)
    # a prompt has one sampled row, whatever it computes
    found, expected = (sampled_step(InFlightStep(1, one), result) for one in (step, _looked(step)))
    assert found.token_ids == expected.token_ids and found.num_accepted == held[:8] and not expected.num_accepted
    assert [len(own) for own in found.token_ids] == held
    assert alike_verifications(step, found) == alike_verifications(_looked(step), expected)


def test_a_step_launched_ahead_has_rows_of_requests_that_have_ended() -> None:
    requests = [_request(5 + index, num_drafts=2) for index in range(2)]
    result = StepResult([100, 101, 8, 9, 9, 9, 100, 7, 7], [0b111, 0b001, 0b011])
    found = sampled_step(InFlightStep(1, _verification(requests), indices=[0, 2]), result)
    assert found.token_ids == [[100, 101, 8], [100, 7]] and found.num_accepted == [3, 2]


def test_a_run_that_has_lost_a_request_is_looked_at() -> None:
    requests = [_request(5 + index, num_drafts=1) for index in range(3)]
    step = _verification(requests)
    requests[1].status = RequestStatus.FINISHED
    assert step.verified is not None
    step.verified.run.leave(requests[1])
    found = sampled_step(InFlightStep(1, step), StepResult([100, 1, 100, 2, 100, 3], [0b11] * 3))
    assert found.token_ids == [[100, 1], [], [100, 3]] and found.num_accepted == []


@pytest.mark.parametrize("drafters", [[NGRAM], [NGRAM, HEAD]], ids=["alone", "beside a head"])
def test_requests_of_a_run_may_draft_what_a_look_at_each_says(drafters: list[DrafterInfo]) -> None:
    """Those that end, whose length leaves less, or that have no slot have budgets of their own, or none."""
    prompts = [_request(9), _request(9, max_tokens=1)]
    requests = [_request(5 + index, num_drafts=2) for index in range(6)]
    requests[1].stop_conditions.max_len = 12
    step = _verification(requests, prompts)
    for request in requests:
        request.token_ids += [100, 1]
        request.num_computed_tokens = request.num_tokens - 1
    requests[2].status = RequestStatus.FINISHED
    requests[4].num_slots = 6
    for prompt in prompts:
        prompt.num_computed_tokens, prompt.token_ids = 9, [*prompt.token_ids, 3]
    tokens = [[100, 1]] * 6 + [[3]] * 2
    found, expected = (_input_after(one, tokens, drafters) for one in (step, _looked(step)))
    assert found.alike is not None and found.alike.indices == [0, 3, 5] and expected.alike is None
    assert found.alike.num_drafts == 5
    alike = dict.fromkeys(found.alike.sequence_ids, 5)
    budgets = {budget.sequence_id: budget.num_drafts for budget in found.budgets}
    assert alike | budgets == {budget.sequence_id: budget.num_drafts for budget in expected.budgets}
    assert set(budgets) == {requests[1].sequence_id, prompts[0].sequence_id} and sorted(budgets.values()) == [3, 5]
    assert sorted(found.computed) == sorted(expected.computed) and bool(found.computed) == (len(drafters) > 1)


def _input_after(step: ScheduledStep, tokens: list[list[int]], drafters: list[DrafterInfo]) -> DraftInput:
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(64, 16), 200)
    scheduler.planner.begin_step(len(step.requests))
    drafting = Drafting(EngineConfig(ModelConfig("m")), drafters, scheduler)
    found = drafting.input_after(InFlightStep(1, step), tokens, StepInputs())
    assert found is not None
    return found


@pytest.mark.parametrize("length", [27, 28, 29])
def test_requests_of_a_run_have_the_blocks_that_a_look_at_each_finds(length: int) -> None:
    """Where a step ends with its block, too: the token behind its last draft needs the next, or nothing is drafted."""
    found = []
    for has_columns in (True, False):
        request, cache = _request(length, num_drafts=4), KVCacheManager(64, 16)
        request.num_slots = 0
        assert cache.allocate(request, length + 4)
        step, scheduler = _verification([request]), Scheduler(SchedulerConfig(), cache, 200)
        scheduler.planner.begin_step(1)
        drafting = Drafting(EngineConfig(ModelConfig("m")), [NGRAM], scheduler)
        drafting.prepare(step if has_columns else _looked(step), is_ahead=False)
        found.append(request.num_slots)
    assert found[0] == found[1] >= length + 5
