"""Runs of decodes: what the scheduler does without a look at each request is what it does with one."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest
from fake_llm import FakeLLM, check_blocks, make_llm
from slipstream.core.decode_run import DecodeRun, needs_look
from slipstream.core.kv_groups import KVGroups
from slipstream.core.outputs import StepOutput
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.speculation import DraftPlanner, Speculation
from slipstream.core.stats import METRICS, Metric, MetricKind
from slipstream.core.step import ScheduledStep
from slipstream.core.verify_run import VerifyRun
from slipstream.engine.step_inputs import StepInputs

MAX_LEN = 60
ALIKE = Speculation("ngram", 3, "exact", may_run_ahead=True)  # the settings of requests that may be in a run


def _ahead(num_ahead: int = 1, **config: object) -> FakeLLM:
    llm = make_llm(max_model_len=MAX_LEN, **config)  # type: ignore[arg-type]
    llm.num_ahead = num_ahead
    return llm


def _request(length: int, max_tokens: int = 30, num_eos: int = 0, **params: object) -> Request:
    asked = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request([length] * length, asked, eos_token_ids=frozenset(range(num_eos)))


def _add(llm: FakeLLM, *requests: Request) -> list[Request]:
    for request in requests:
        llm.scheduler.add(request)
    return list(requests)


def _are_runs(llm: FakeLLM, num_steps: int) -> list[bool]:
    for _ in range(num_steps):
        llm.step()
    return [step.run is not None for step in llm.steps[-num_steps:]]


# ---- when there is one


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_from_the_third_step_of_decodes_on_until_the_last_tokens(num_ahead: int) -> None:
    llm = _ahead(num_ahead)
    _add(llm, _request(3, 9), _request(5, 30))
    assert _are_runs(llm, 11 + num_ahead)[:3] == [False] * 3, "a prompt, and two steps that look"
    runs = [step.run is not None for step in llm.steps]
    assert all(runs[3:]), "also where the first one has ended"
    llm.run()
    assert all(step.run is not None for step in llm.steps[3:] if step.requests)


def test_it_goes_on_with_requests_that_join_and_without_those_that_leave() -> None:
    llm = _ahead()
    first, second = _add(llm, _request(3), _request(5))
    assert _are_runs(llm, 5)[-1]
    third = _add(llm, _request(7))[0]
    assert _are_runs(llm, 1) == [True] and llm.steps[-1].requests == [first, second, third]
    assert llm.steps[-1].run is not None and llm.steps[-1].run.requests == [first, second], "it computes a prompt"
    assert _are_runs(llm, 4) == [True] * 4
    assert llm.steps[-1].run is not None and llm.steps[-1].run.requests == [first, second, third]
    llm.scheduler.finish(second, FinishReason.CANCELLED)
    assert _are_runs(llm, 3) == [True] * 3 and llm.steps[-1].requests == [first, third]


def test_the_order_is_that_of_the_running_requests() -> None:
    llm = _ahead()
    first, second = _add(llm, _request(3), _request(5))
    _are_runs(llm, 5)
    urgent = _request(7)
    urgent.priority = -1
    _add(llm, urgent)
    assert all(_are_runs(llm, 3)) and llm.steps[-1].requests == [urgent, first, second]


def test_one_that_joins_and_needs_a_look_ends_it() -> None:
    llm = _ahead()
    _add(llm, _request(3), _request(5))
    assert _are_runs(llm, 5)[-1]
    _add(llm, _request(4, 4, stop_words_ids=((2000, 2001),)))
    assert _are_runs(llm, 5) == [True] + [False] * 4, "one step computes its prompt"
    assert _are_runs(llm, 3)[-1], "another when it has ended"


@pytest.mark.parametrize(
    "wants_a_look",
    [{"stop_words_ids": ((7, 8),)}, {"bad_words_ids": ((1, 2),)}],
    ids=["stop words are matched token by token", "the last token has to be known"],
)
def test_none_with_a_request_that_needs_a_look(wants_a_look: dict[str, object]) -> None:
    llm = _ahead()
    _add(llm, _request(3), _request(5, **wants_a_look))
    assert not any(_are_runs(llm, 12))


def test_none_with_a_grammar() -> None:
    llm = _ahead()
    _add(llm, _request(3), special := _request(5))
    special.grammar_state = object()
    assert not any(_are_runs(llm, 12))


def test_requests_that_may_draft_are_in_it_until_drafts_are_made() -> None:
    llm = _ahead()
    _add(llm, _request(3), special := _request(5))
    special.speculation = Speculation("ngram", 3, "exact")
    planner = llm.scheduler.planner = _Fickle()
    assert _are_runs(llm, 6)[3:] == [True] * 3
    planner.makes_drafts = True
    assert not any(_are_runs(llm, 6))
    planner.makes_drafts = False
    assert _are_runs(llm, 6)[-1]
    special.draft_token_ids = [1]  # left from before
    assert needs_look(special, lambda wanted: False)
    _add(llm, other := _request(4))
    other.speculation = Speculation("mtp", 2, "exact")
    special.draft_token_ids = []
    assert all(_are_runs(llm, 3)), "one that joins and does not draft either"


def test_a_step_of_a_run_looks_at_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = _ahead()
    _add(llm, *(_request(3 + index, 40) for index in range(4)))
    _are_runs(llm, 6)
    monkeypatch.setattr(Scheduler, "_schedule_decodes", None)
    assert all(_are_runs(llm, 10))


def test_what_ended_requests_stop_at_is_looked_for_no_more() -> None:
    """Clients choose their stop tokens: a run that lasts for days must not gather them."""
    llm = _ahead()
    first, second, _ = _add(llm, *(_request(3 + index, 40, stop_token_ids=(2000 + index,)) for index in range(3)))
    _are_runs(llm, 5)
    for request, left in ((second, {2000, 2002}), (first, {2002})):
        llm.scheduler.finish(request, FinishReason.CANCELLED)
        assert all(_are_runs(llm, 2))
        run = llm.steps[-1].run
        assert run is not None and run.stop_ids == left and len(run.run._stop_sets) == len(left)


# ---- it is the same


class _Fickle(DraftPlanner):
    """Makes drafts now and then, whatever they bring."""

    makes_drafts = False

    def num_drafts_of(self, wanted: Speculation) -> int:
        return wanted.num_draft_tokens if self.makes_drafts else 0


def _land_with_drafts(llm: FakeLLM, step: ScheduledStep, sampled: list[list[int]]) -> list[StepOutput]:
    """`FakeLLM._land` where the planner decides who drafts, as in the engine."""
    outputs = list(llm.scheduler.commit(step, sampled))
    for request, samples in zip(step.requests, step.samples):
        is_known = request.num_computed_tokens == request.num_tokens - 1
        if (
            samples
            and request.status is RequestStatus.RUNNING
            and is_known
            and llm.scheduler.planner.num_drafts(request)
        ):
            count = request.token_ids[-1] % 5 if request.speculation is ALIKE else llm.num_drafts
            request.draft_token_ids = llm._draft(request.token_ids, request.seed)[:count]
    llm.take(outputs)
    return outputs


@dataclass
class _Told:
    """What is to be the same: messages by step, outputs, requests, counters and observations."""

    steps: list[object] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    states: list[object] = field(default_factory=list)
    stats: dict[int, list[float]] = field(default_factory=dict)
    num_runs: int = 0
    num_verified: int = 0  # steps of runs of verifications
    num_torn: int = 0  # of these: a request has ended before the step was read
    num_preemptions: int = 0


def _live(seed: int, num_ahead: int, windows: bool, drafts: bool = False, alike: bool = False) -> _Told:
    """Requests come, are cancelled, end by tokens and lengths, and are preempted where blocks are short. drafts: most
    may draft, and do now and then. alike: nearly all have the same settings, and draft nearly always.

    From some seeds on many come, with priorities, and now and then one that needs a look."""
    dice, told = random.Random(seed), _Told()
    rate, has_special = (0.08, False) if seed < 3 else (0.4, seed % 2 == 0)
    groups = KVGroups(1, 1, 8, max_step_tokens=24) if windows else KVGroups()
    llm = _ahead(num_ahead, num_blocks=dice.choice([30, 45, 90]), groups=groups, max_num_batched_tokens=24)
    requests: list[Request] = []
    planner = _Fickle()

    def land(step: ScheduledStep, sampled: list[list[int]]) -> list[StepOutput]:
        if alike and dice.random() < 0.05:  # as a client that goes away while the step is computed
            output = llm.scheduler.finish(dice.choice(step.requests), FinishReason.CANCELLED)
            assert output is not None
            llm.take([output])
        told.num_torn += step.verified is not None and not step.verified.is_whole
        return _land_with_drafts(llm, step, sampled)

    if drafts:
        llm.num_drafts, llm.num_right, llm.scheduler.planner = 3, 1, planner
        llm._land = land  # type: ignore[method-assign]
        planner.makes_drafts = alike
        llm.num_right += alike
    inputs = StepInputs(has_windows=windows)
    schedule = llm.scheduler.schedule

    def scheduled() -> ScheduledStep:
        step = schedule()
        if step.requests:
            told.steps.append(_message({one.sequence_id: index for index, one in enumerate(requests)}, inputs, step))
        return step

    llm.scheduler.schedule = scheduled  # type: ignore[method-assign,assignment]
    for _ in range(250):
        if dice.random() < rate:
            requests += _add(llm, _any_request(dice, has_special and dice.random() < 0.05))
            if drafts and dice.random() < (0.98 if alike else 0.8):
                requests[-1].speculation = ALIKE if alike else Speculation("ngram", dice.choice([2, 3]), "exact")
        if drafts and dice.random() < (0.3 if alike and not planner.makes_drafts else 0.02 if alike else 0.08):
            planner.makes_drafts = not planner.makes_drafts
        if dice.random() < 0.03 and (live := list(llm.scheduler.live_requests)):
            output = llm.scheduler.finish(dice.choice(live), FinishReason.CANCELLED)
            assert output is not None
            llm.take([output])
        told.outputs += [(one.new_token_ids, one.finish_reason, one.request.num_tokens) for one in llm.step()]
        told.states.append([(one.block_ids[:], one.num_published_blocks, one.num_computed_tokens) for one in requests])
        told.states.append([(one.num_drafted_tokens, one.num_accepted_tokens, one.draft_token_ids) for one in requests])
        told.states.append([(one.num_output_placeholders, one.window_block_ids[:], one.num_tokens) for one in requests])
        told.num_runs += llm.steps[-1].run is not None
        told.num_verified += llm.steps[-1].verified is not None and bool(sum(llm.steps[-1].num_drafts))
        told.num_preemptions += len(llm.steps[-1].preempted)
        _note_stats(llm, told.stats)
        check_blocks(llm.scheduler)
    assert all(request.times.first_token_ns <= request.times.last_token_ns for request in requests)
    return told


def _any_request(dice: random.Random, is_special: bool) -> Request:
    params = {"stop_words_ids": ((2000, 2001),)} if is_special else {"stop_token_ids": (dice.randrange(1009),)}
    request = _request(dice.randrange(1, 30), dice.randrange(1, 45), dice.choice([0, 0, 40]), **params)
    request.priority = dice.choice([0, 0, 0, -1, 1])
    return request


def _message(numbers: dict[int, int], inputs: StepInputs, step: ScheduledStep) -> object:
    """What the worker is told. numbers: of requests, by sequence id."""
    message = inputs.build(0, step)
    changes = message.updates
    return [
        [numbers[known] for known in message.sequence_ids], message.num_computed_tokens, message.num_scheduled_tokens,
        message.samples, message.token_ids, message.pending,
        {numbers[known]: blocks for known, blocks in changes.block_ids.items()},
        {numbers[known]: blocks for known, blocks in changes.window_block_ids.items()},
        [(numbers[new.sequence_id], new.block_ids) for new in message.new_requests],
    ]  # fmt: skip


def _note_stats(llm: FakeLLM, totals: dict[int, list[float]]) -> None:
    llm.scheduler.stats.publish()
    for metric, values in llm.scheduler.stats.drain():
        if METRICS[metric].kind is not MetricKind.GAUGE:
            totals.setdefault(metric, []).extend(values)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_steps_and_outputs_are_those_without_runs(
    seed: int, num_ahead: int, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", partial(next, count(10**9, 10**6)))
    with_runs = _live(seed, num_ahead, windows)
    monkeypatch.setattr(time, "time_ns", partial(next, count(10**9, 10**6)))
    monkeypatch.setattr(DecodeRun, "after", classmethod(lambda *arguments: None))
    without = _live(seed, num_ahead, windows)
    assert with_runs.num_runs > 20 and without.num_runs == 0
    for name in ("steps", "outputs", "states", "stats", "num_preemptions"):
        assert getattr(with_runs, name) == getattr(without, name), name


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_drafted_between_runs_is_the_same_without_them(
    seed: int, num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", partial(next, count(10**9, 10**6)))
    with_runs = _live(seed, num_ahead, windows=False, drafts=True)
    monkeypatch.setattr(time, "time_ns", partial(next, count(10**9, 10**6)))
    monkeypatch.setattr(DecodeRun, "after", classmethod(lambda *arguments: None))
    without = _live(seed, num_ahead, windows=False, drafts=True)
    assert with_runs.num_runs > 5 and without.num_runs == 0
    assert sum(with_runs.stats[Metric.ACCEPTED_TOKENS]) > 5
    for name in ("steps", "outputs", "states", "stats", "num_preemptions"):
        assert getattr(with_runs, name) == getattr(without, name), name


@pytest.mark.parametrize("seed", range(12))
def test_verifications_are_those_without_runs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", partial(next, count(10**9, 10**6)))
    with_runs = _live(seed, 0, windows=False, drafts=True, alike=True)
    monkeypatch.setattr(time, "time_ns", partial(next, count(10**9, 10**6)))
    monkeypatch.setattr(VerifyRun, "after", classmethod(lambda *arguments: None))
    without = _live(seed, 0, windows=False, drafts=True, alike=True)
    assert with_runs.num_verified > 20 and with_runs.num_torn > 0 and without.num_verified == 0
    assert sum(with_runs.stats[Metric.ACCEPTED_TOKENS]) > 20
    for name in ("steps", "outputs", "states", "stats", "num_preemptions"):
        assert getattr(with_runs, name) == getattr(without, name), name


def test_a_run_of_verifications_looks_only_at_requests_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = _ahead(0)
    llm.num_drafts, llm.num_right = 3, 1
    first, second, third = requests = [_request(3 + index, 40) for index in range(3)]
    for request in requests:
        request.speculation = ALIKE
    looks: list[int] = []
    look = Scheduler._schedule_decodes

    def noted(scheduler: Scheduler, step: ScheduledStep, budget: int, prefills: list[Request]) -> int:
        looks.append(len(llm.steps))
        return look(scheduler, step, budget, prefills)

    monkeypatch.setattr(Scheduler, "_schedule_decodes", noted)
    _add(llm, first, second)
    for _ in range(6):
        llm.step()
    assert looks == [1], "the step that follows their prompts"
    _add(llm, third)
    for _ in range(4):
        llm.step()
    assert llm.steps[6].verified is not None and llm.steps[6].verified.requests == [first, second], "beside its prompt"
    assert llm.steps[7].verified is not None and llm.steps[7].verified.requests == requests
    llm.scheduler.finish(second, FinishReason.CANCELLED)
    for _ in range(4):
        llm.step()
    assert llm.steps[-1].verified is not None and llm.steps[-1].verified.requests == [first, third] and looks == [1]
    _add(llm, fourth := _request(9, 3))
    fourth.speculation = Speculation("ngram", 2, "exact")
    for _ in range(4):
        llm.step()
    assert looks == [1, 15, 16] and fourth.is_finished, "it has other settings"
    llm.scheduler.runs.end_verifications()
    llm.step()
    assert looks[3:] == [18]


def test_requests_are_preempted_in_such_lives() -> None:
    assert any(_live(seed, 0, windows=False, drafts=True, alike=True).num_preemptions for seed in range(6))
    assert any(_live(seed, 1, windows=False).num_preemptions for seed in range(6))
