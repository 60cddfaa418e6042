"""engine/in_flight.py: which launched step is the scheduled one, and whose the numbers of a result are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from slipstream.core.config import EngineConfig, ModelConfig, SchedulerConfig
from slipstream.core.errors import EngineError, RankLostError
from slipstream.core.finish import StopConditions
from slipstream.core.host_cache import BlockCopies
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.layered_prefill import LayeredChunk
from slipstream.core.outputs import StepOutput, StepOutputs, TokenLogprobs
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.engine.drafting import Drafting
from slipstream.engine.in_flight import (
    AheadStep,
    InFlightStep,
    add_logprobs,
    end_all,
    failures_of,
    sampled_step,
)
from slipstream.engine.step_inputs import StepInputs
from slipstream.worker.interface import AlikeBudgets, DrafterInfo, DraftResult, ProcessorReport, StepResult


def _requests(count: int) -> list[Request]:
    found = [Request([1, 2, 3], SamplingParams()) for _ in range(count)]
    for request in found:
        request.num_slots = 16
    return found


def _rows(requests: list[Request], num_computed: int = 3, num_drafts: int = 2) -> list[ScheduledRequest]:
    return [ScheduledRequest(request, num_computed, 1 + num_drafts, True, num_drafts) for request in requests]


def _ahead(requests: list[Request]) -> AheadStep:
    return AheadStep.of(InFlightStep(7, ScheduledStep.of(_rows(requests)), ("mtp",)))


# ---- what was launched ahead


def test_a_step_of_the_same_requests_is_the_launched_one_with_those_that_are_left() -> None:
    requests = _requests(3)
    ahead = _ahead(requests)
    for left, indices in (([0, 1, 2], None), ([0, 2], [0, 2]), ([1], [1])):
        step = ScheduledStep.of(_rows([requests[place] for place in left], num_computed=13))
        found = ahead.match(step)
        assert found is not None and found.step is step and found.indices == indices
        assert (found.step_id, found.draft_methods) == (7, ("mtp",))


def _preempt(requests: list[Request], step: ScheduledStep) -> None:
    requests[1].note_preempted()  # and it runs again, in other blocks


def _preempt_another(requests: list[Request], step: ScheduledStep) -> None:
    step.preempted.append(Request([1], SamplingParams()))


def _copy_blocks(requests: list[Request], step: ScheduledStep) -> None:
    step.copies = BlockCopies(loads=[(1, 2)])


def _compute_layers(requests: list[Request], step: ScheduledStep) -> None:
    step.layered = LayeredChunk(requests[0], 0, 1, 0, 1)


def _draft_less(requests: list[Request], step: ScheduledStep) -> None:
    step.num_drafts[1], step.num_scheduled_tokens[1] = 1, 2


def _compute_a_prompt(requests: list[Request], step: ScheduledStep) -> None:
    step.num_scheduled_tokens[1] += 1


def _need_another_block(requests: list[Request], step: ScheduledStep) -> None:
    requests[1].num_slots += 16  # after the launch, which does not know it
    step.num_computed_tokens[1] = 14


def _let_one_join(requests: list[Request], step: ScheduledStep) -> None:
    (other,) = _requests(1)
    step.add(other, 3, 3, True, 2)


@pytest.mark.parametrize(
    "change",
    [
        _preempt,
        _preempt_another,
        _copy_blocks,
        _compute_layers,
        _draft_less,
        _compute_a_prompt,
        _need_another_block,
        _let_one_join,
    ],
)
def test_any_other_step_is_launched_anew(change: Callable[[list[Request], ScheduledStep], None]) -> None:
    requests = _requests(2)
    ahead, step = _ahead(requests), ScheduledStep.of(_rows(requests))
    assert ahead.match(step) is not None
    change(requests, step)
    assert ahead.match(step) is None


# ---- whose the tokens are


def _logprobs(first: int, count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(first + place, -float(place), 1) for place in range(count)]


def test_tokens_go_to_the_requests_that_sample() -> None:
    requests = _requests(3)
    step = ScheduledStep.of([ScheduledRequest(request, 0, 3, request is not requests[1]) for request in requests])
    assert sampled_step(InFlightStep(1, step), StepResult([8, 9])).token_ids == [[8], [], [9]]


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("indices", [None, [0, 2, 3]])
def test_accepted_drafts_go_to_their_own_requests(indices: list[int] | None, has_ended: bool) -> None:
    """Rows of a request that has ended meanwhile are nobody's, be it in the step or left out of it."""
    requests = _requests(3)
    for place, request in enumerate(requests):
        request.draft_token_ids = [10 * place + 1, 10 * place + 2]
    if has_ended:
        requests[1].status = RequestStatus.FINISHED
    step = ScheduledStep.of(_rows(requests))
    places = [0, 1, 2] if indices is None else indices
    masks, drawn = [0b001] * 4, [99] * 12
    for place, mask in zip(places, (0b011, 0b001, 0b111)):
        masks[place], drawn[3 * place : 3 * place + 3] = mask, [100 * place + row for row in range(3)]
    entries = {request.sequence_id: _logprobs(0, 3) for request in requests[:2]}
    found = sampled_step(InFlightStep(1, step, indices=indices), StepResult(drawn, masks, entries))
    tokens = [[1, 1], [100 * places[1]], [21, 22, 100 * places[2] + 2]]
    rows = {0: (0, 1), 1: (0,), 2: (0, 1, 2)}
    ids = {requests[0].sequence_id: [0, 1], requests[1].sequence_id: [0]}
    if has_ended:
        tokens[1] = []
        del rows[1], ids[requests[1].sequence_id]
    assert found.token_ids == tokens and found.accepted_rows == rows
    assert {known: [entry.token_id for entry in of_one] for known, of_one in found.logprobs.items()} == ids


def test_a_verification_beside_prompts_and_plain_decodes() -> None:
    plain, prompt, drafting = _requests(3)
    drafting.draft_token_ids = [4]
    rows = [(plain, True, 0), (prompt, False, 0), (drafting, True, 1)]
    step = ScheduledStep.of([ScheduledRequest(one, 3, 1 + count, samples, count) for one, samples, count in rows])
    found = sampled_step(InFlightStep(1, step), StepResult([50, 60, 61], [1, 0, 0b11]))
    assert found.token_ids == [[50], [], [4, 61]] and found.accepted_rows == {2: (0, 1)}


def test_who_waits_for_blocks_of_its_own_again_is_told_to_the_worker_with_its_next_step() -> None:
    """Preempted while its chunk is in flight, it runs again, with a cached prefix that is still being loaded."""
    drafters = [DrafterInfo("mtp", 3, 3, 3, is_head=True, reads_all_rows=True)]
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(8, 4), 64)
    drafting = Drafting(EngineConfig(ModelConfig("m")), drafters, scheduler)
    inputs, request = StepInputs(needs_hashes=True), Request([1] * 9, SamplingParams(), block_ids=[0, 1, 2])
    step = ScheduledStep.of([ScheduledRequest(request, 0, 8, False)])
    assert [new.block_ids for new in inputs.build(1, step).new_requests] == [[0, 1, 2]]
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    found = drafting.input_after(InFlightStep(1, step), [[]], inputs)
    assert found is not None and found.computed == [(request.sequence_id, 0, 8)]
    request.note_preempted()
    request.status, request.num_computed_tokens, request.block_ids = RequestStatus.RUNNING, 8, [5, 6, 7]
    assert drafting.input_after(InFlightStep(1, step), [[]], inputs) is None
    again = ScheduledStep.of([ScheduledRequest(request, 8, 1, True)])
    assert [new.block_ids for new in inputs.build(2, again).new_requests] == [[5, 6, 7]]


# ---- what may draft behind a verification that has been read


def _verified(num_requests: int, drafts_trees: bool = False) -> tuple[Drafting, StepInputs, list[Request], AheadStep]:
    """A verification of two drafts of each request that is committed with all of them, and the one launched behind."""
    drafters = [DrafterInfo("mtp", 2, 2, 2, is_head=True, reads_all_rows=True, drafts_trees=drafts_trees)]
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(64, 16), 64)
    scheduler.planner.begin_step(num_requests)
    drafting = Drafting(EngineConfig(ModelConfig("m")), drafters, scheduler)
    inputs, requests = StepInputs(needs_hashes=True), _requests(num_requests)
    wanted = drafting.resolve(SamplingParams(temperature=0.0, speculative_method="mtp"))
    for request in requests:
        request.stop_conditions = StopConditions(request, 64)
        request.speculation, request.num_sent_blocks, request.num_slots = wanted, 0, 32
    step = ScheduledStep.of(_rows(requests, num_computed=2))
    assert drafting.method_ahead(step, ("mtp",)) == "mtp"
    ahead = AheadStep.of(InFlightStep(2, step, ("mtp",)))
    for request in requests:
        request.status, request.token_ids, request.num_computed_tokens = RequestStatus.RUNNING, [1, 2, 3, 4, 5, 6], 5
    return drafting, inputs, requests, ahead


def test_requests_of_a_verification_launched_ahead_draft_alike_as_each_by_itself() -> None:
    drafting, inputs, requests, ahead = _verified(4)
    requests[1].status = RequestStatus.FINISHED
    requests[2].note_preempted()
    read, tokens = InFlightStep(1, ahead.in_flight.step, ("mtp",)), [[4, 5, 6]] * 4
    found = drafting.input_after(read, tokens, inputs, ahead)
    each = drafting.input_after(read, tokens, inputs)
    assert found is not None and each is not None and not found.budgets and each.alike is None
    assert found.alike == AlikeBudgets("mtp", 2, [requests[0].sequence_id, requests[3].sequence_id], [0, 3])
    pairs = [(budget.sequence_id, budget.num_drafts, budget.index, budget.has_scratch) for budget in each.budgets]
    assert pairs == [(one.sequence_id, 2, index, True) for one, index in ((requests[0], 0), (requests[3], 3))]
    assert found.computed == each.computed == [(requests[place].sequence_id, 2, 3) for place in (0, 3)]
    drafting.assign(read.step, found, DraftResult([], chains=[[7, 8], []]))
    assert [request.draft_token_ids for request in requests] == [[7, 8], [], [], []]


def _lose(drafting: Drafting, requests: list[Request]) -> None:
    requests[1].speculation = None


def _ask_for_less(drafting: Drafting, requests: list[Request]) -> None:
    requests[1].speculation = drafting.resolve(
        SamplingParams(temperature=0.0, num_draft_tokens=1, speculative_method="mtp")
    )


def _plan_less(drafting: Drafting, requests: list[Request]) -> None:
    drafting._scheduler.planner.num_drafts_of = lambda wanted: 1  # type: ignore[method-assign]


def _begin_again(drafting: Drafting, requests: list[Request]) -> None:
    requests[1].num_computed_tokens = 16


@pytest.mark.parametrize(
    ("change", "num_drafting"), [(_lose, 2), (_ask_for_less, 3), (_plan_less, 3), (_begin_again, 2)]
)
def test_each_is_looked_at_once_one_is_not_as_it_was(
    change: Callable[[Drafting, list[Request]], None], num_drafting: int
) -> None:
    drafting, inputs, requests, ahead = _verified(3)
    change(drafting, requests)
    found = drafting.input_after(InFlightStep(1, ahead.in_flight.step), [[4, 5, 6]] * 3, inputs, ahead)
    assert found is not None and found.alike is None and len(found.budgets) == num_drafting


def test_each_is_looked_at_where_drafts_are_trees_and_behind_another_step() -> None:
    drafting, inputs, _, ahead = _verified(2, drafts_trees=True)
    found = drafting.input_after(InFlightStep(1, ahead.in_flight.step), [[4, 5, 6]] * 2, inputs, ahead)
    assert found is not None and found.alike is None and len(found.budgets) == 2
    drafting, inputs, requests, ahead = _verified(2)
    another = ScheduledStep.of(_rows(requests, num_computed=2))
    found = drafting.input_after(InFlightStep(1, another), [[4, 5, 6]] * 2, inputs, ahead)
    assert found is not None and found.alike is None and len(found.budgets) == 2


def _log_probabilities(requests: list[Request], step: ScheduledStep) -> None:
    requests[1].speculation = replace(requests[1].speculation, may_run_ahead=False)  # type: ignore[type-var]


def _a_grammar(requests: list[Request], step: ScheduledStep) -> None:
    requests[1].grammar_state = object()


def _an_end(requests: list[Request], step: ScheduledStep) -> None:
    requests[1].stop_conditions.max_len = len(requests[1].token_ids) + 6


def _no_slots(requests: list[Request], step: ScheduledStep) -> None:
    requests[1].num_slots = 2 + 3 + 1 + 3 + 2 - 1


def _a_plain_row(requests: list[Request], step: ScheduledStep) -> None:
    step.num_drafts[1], step.num_scheduled_tokens[1] = 0, 1


@pytest.mark.parametrize("change", [_log_probabilities, _a_grammar, _an_end, _no_slots, _a_plain_row, _draft_less])
def test_nothing_is_launched_behind_a_verification_unless_all_go_on_alike(
    change: Callable[[list[Request], ScheduledStep], None],
) -> None:
    drafting, _, requests, ahead = _verified(3)
    step = ahead.in_flight.step
    for request in requests:
        request.token_ids = [1, 2, 3]
    assert drafting.method_ahead(step, ("mtp",)) == "mtp"
    change(requests, step)
    assert drafting.method_ahead(step, ("mtp",)) == ""


def test_log_probabilities_end_where_the_tokens_do() -> None:
    """A stop has cut off what was drawn behind it."""
    cut, whole, without = _requests(3)
    step = ScheduledStep.of(_rows([cut, whole, without], num_drafts=0))
    entries = {cut.sequence_id: _logprobs(0, 3), whole.sequence_id: _logprobs(5, 2)}
    result = StepResult(
        [], logprobs=entries, prompt_logprobs={whole.sequence_id: [None]}, context_logits={whole.sequence_id: [b"x"]}
    )
    sampled = replace(sampled_step(InFlightStep(1, step), StepResult([1, 2, 3])), logprobs=entries)
    outputs = StepOutputs([StepOutput(cut, [0, 1]), StepOutput(whole, [5, 6]), StepOutput(without, [3])])
    add_logprobs(outputs, sampled, result)
    first, second, third = outputs
    assert (first.logprobs, first.prompt_logprobs, first.context_logits) == (entries[cut.sequence_id][:2], None, None)
    assert (second.logprobs, second.prompt_logprobs, second.context_logits) == (_logprobs(5, 2), [None], [b"x"])
    assert third.logprobs is None and third.prompt_logprobs is None
    assert [request.cumulative_logprob for request in (cut, whole, without)] == [-1.0, -1.0, 0.0]


# ---- whose the failures are


def test_who_fails_in_a_step_is_said_once() -> None:
    by_grammar, by_processor, ended, _ = requests = _requests(4)
    ended.status = RequestStatus.FINISHED
    own = EngineError("a grammar")
    step = InFlightStep(1, ScheduledStep.of(_rows(requests)), failures=[(by_grammar, own)])
    assert failures_of(step, StepResult([])) == [(by_grammar, own)]
    report = ProcessorReport(0.0, {by_processor.sequence_id: "a processor", ended.sequence_id: "late"})
    first, (request, error), *others = failures_of(step, StepResult([], processors=report))
    assert first == (by_grammar, own) and request is by_processor and str(error) == "a processor" and not others


def test_a_death_answers_each_request_once_with_its_kind_of_error() -> None:
    """Also those of a step that was launched twice; an answer of the same step stands, a part of one does not."""
    ended, talking, silent = _requests(3)
    outputs = StepOutputs([StepOutput(ended, [4], FinishReason.STOP), StepOutput(talking, [5])])
    outputs = end_all([ended, talking, silent, talking], RankLostError("rank 1"), outputs)
    assert outputs.ended() == [ended, talking, silent] and not ended.error
    for output in list(outputs)[2:]:
        assert (output.finish_reason, output.error, output.fault) == (FinishReason.ERROR, "rank 1", RankLostError)
        request = output.request
        assert request.is_finished and (request.finish_reason, request.error) == (FinishReason.ERROR, "rank 1")
