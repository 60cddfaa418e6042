"""core/prefill_budget.py, alone and in the scheduler: prompts beside decodes take about as long in every step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from statistics import median

import pytest
from fake_llm import FakeLLM, make_llm, make_request
from slipstream.core.adapters import Adapter
from slipstream.core.config import SchedulerConfig
from slipstream.core.outputs import StepOutput
from slipstream.core.prefill_budget import AUTO_RATIO, AUTO_STEP_SECONDS, MIN_CHUNK, PrefillBudget, StepPace
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep

PARITY = 1000.0


def step_of(num_decodes: int) -> ScheduledStep:
    return ScheduledStep(requests=[make_request(3) for _ in range(num_decodes)])


def test_tokens_count_by_their_context() -> None:
    budget = PrefillBudget(1200, PARITY)
    budget.begin_step(step_of(3))
    assert budget.take(0, 300, 4096) == 300
    assert budget.take(2000, 5000, 4096) == 300  # 900 left, three for each
    assert budget.take(0, 5000, 4096) == 0
    budget.begin_step(step_of(3))
    assert budget.take(9000, 5000, 4096) == MIN_CHUNK  # 120 would fit
    assert budget.take(0, 1, 4096) == 0
    budget.begin_step(step_of(3))
    assert budget.take(0, 5000, 70) == 70


def test_a_limit_below_the_least_chunk_holds() -> None:
    budget = PrefillBudget(32, PARITY)
    budget.begin_step(step_of(1))
    assert budget.take(100_000, 5000, 4096) == 32


def test_without_decodes_or_chunks_there_is_no_limit() -> None:
    for limit, num_decodes in ((16, 0), (None, 5)):
        budget = PrefillBudget(limit, PARITY)
        budget.begin_step(step_of(num_decodes))
        assert [budget.take(50_000, 3000, 4096), budget.take(0, 2000, 1096)] == [3000, 1096]


def chunks(llm: FakeLLM, prompt: Request) -> Iterator[tuple[int, int, int]]:
    """(computed, new, other requests) of each step that computes the prompt."""
    while prompt.num_output_tokens == 0:
        llm.step()
        for row in llm.steps[-1].rows:
            if row.request is prompt:
                yield row.num_computed_tokens, row.num_scheduled_tokens, len(llm.steps[-1].requests) - 1


@pytest.mark.parametrize("limit", [0, 300])
def test_a_long_prompt_gets_shorter_chunks_as_it_goes(limit: int) -> None:
    llm = make_llm(max_num_batched_tokens=600, max_mixed_prefill_tokens=limit, num_blocks=2000, max_model_len=6000,
                   attention_parity=PARITY)  # fmt: skip
    streams = [make_request(3 + index, 2000) for index in range(4)]
    for stream in streams:
        llm.scheduler.add(stream)
    llm.step()
    llm.scheduler.add(prompt := make_request(3000, 4))
    found = list(chunks(llm, prompt))
    assert sum(new for _, new, _ in found) == 3000
    most = limit or 600
    for computed, new, others in found[:-2]:
        assert others == 4  # every stream decodes in every step
        cost = new * (1 + computed / PARITY)
        assert cost <= most or new == MIN_CHUNK
        assert cost > most * 0.9 or new + others == 600
    assert found[0][1] > 2 * found[-2][1]


def test_a_prompt_alone_takes_whole_steps() -> None:
    llm = make_llm(max_num_batched_tokens=600, max_mixed_prefill_tokens=100, num_blocks=2000, max_model_len=6000,
                   attention_parity=PARITY)  # fmt: skip
    llm.scheduler.add(prompt := make_request(1500, 4))
    assert [new for _, new, _ in chunks(llm, prompt)] == [600, 600, 300]


def test_whole_prompts_stay_whole_without_chunked_prefill() -> None:
    llm = make_llm(max_num_batched_tokens=600, max_mixed_prefill_tokens=100, enable_chunked_prefill=False,
                   num_blocks=2000, max_model_len=600, attention_parity=PARITY)  # fmt: skip
    llm.scheduler.add(make_request(3, 100))
    llm.step()
    llm.scheduler.add(prompt := make_request(500, 4))
    assert [new for _, new, _ in chunks(llm, prompt)] == [500]


def test_no_parity_means_equal_tokens() -> None:
    budget = PrefillBudget(100, math.inf)
    budget.begin_step(step_of(1))
    assert budget.take(10**6, 500, 4096) == 100


class SimulatedDevice:
    """Steps one after another, as a scheduler that runs a step ahead sees them: seconds of decodes, of a prompt's token
    without a context, of a step with a prompt besides, and now and then a step that waits for something."""

    def __init__(
        self, pace: StepPace | None, quiet_s: float = 0.005, token_s: float = 25e-6, parity: float = PARITY
    ) -> None:
        self.now, self.quiet_s, self.token_s, self.parity = 100.0, quiet_s, token_s, parity
        self.budget = PrefillBudget(4096, parity, pace, clock=lambda: self.now)
        self._last: ScheduledStep | None = None
        self._last_s = 0.0

    def step(
        self, num_decodes: int, num_computed: int = 0, num_missing: int = 0, stall_s: float = 0.0
    ) -> tuple[int, float]:
        """Returns the prompt's tokens in the step, and its seconds."""
        step = step_of(num_decodes)
        self.budget.begin_step(step)
        num_new = self.budget.take(num_computed, num_missing, 4096) if num_missing else 0
        step.requests += [make_request(3)] * (num_new > 0)
        seconds = self.quiet_s * (num_decodes > 0) + stall_s
        seconds += 0.002 * (num_new > 0) + self.token_s * num_new * (1 + num_computed / self.parity)
        if self._last is not None:
            self.now += self._last_s
            self.budget.note_done(self._last)
        self._last, self._last_s = step, seconds
        return num_new, seconds

    def idle(self, seconds: float) -> None:
        assert self._last is not None
        self.now += self._last_s
        self.budget.note_done(self._last)
        self.now, self._last = self.now + seconds, None

    def prompt(self, num_tokens: int, num_decodes: int, num_cached: int = 0) -> list[float]:
        """Seconds of the steps that compute a prompt."""
        computed, found = num_cached, []
        while computed < num_tokens:
            num_new, seconds = self.step(num_decodes, computed, num_tokens - computed)
            computed += num_new
            if num_new:  # else it is one of decodes alone, to be measured
                found.append(seconds)
        return found


def warmed(pace: StepPace | None, **sizes: float) -> SimulatedDevice:
    device = SimulatedDevice(pace, **sizes)
    device.prompt(3000, num_decodes=0)
    for _ in range(20):
        device.step(8)
    return device


@pytest.mark.parametrize("wanted_s", [0.0, 0.012, 0.04])
def test_steps_take_as_long_as_they_may_from_a_prompts_beginning_to_its_end(wanted_s: float) -> None:
    device = warmed(StepPace(wanted_s))
    target = wanted_s or AUTO_STEP_SECONDS
    found = device.prompt(30_000, num_decodes=8)
    least = 0.005 + 0.002 + MIN_CHUNK * 31 * 25e-6  # MIN_CHUNK tokens at the prompt's end
    assert max(found[3:]) <= max(1.1 * target, 1.01 * least)
    assert min(found[3:-1]) >= 0.85 * target
    assert found[0] < 1.5 * target  # known from the prompt before


@pytest.mark.parametrize(("bounds", "expected_s"), [((0.0, 1.5), 0.03), ((0.027, 1.5), 0.027), ((0.5, 2.0), 0.04)])
def test_steps_take_as_many_times_as_long_as_decodes_as_they_may(
    bounds: tuple[float, float], expected_s: float
) -> None:
    """Decodes alone take 20 ms. The lower bound holds."""
    found = warmed(StepPace(*bounds), quiet_s=0.02, parity=math.inf).prompt(30_000, 32)[15:-1]
    assert 0.9 * expected_s <= min(found) and max(found) <= 1.02 * expected_s


def test_without_a_pace_steps_are_bounded_by_tokens_alone() -> None:
    device = warmed(None)
    assert max(device.prompt(30_000, num_decodes=8)) > 0.1


def test_many_decodes_leave_prompts_their_share() -> None:
    """Three quiet steps, where decodes alone take nearly as long as the automatic bound. A setting holds literally."""
    slow, bounded = warmed(StepPace(), quiet_s=0.02), warmed(StepPace(0.025), quiet_s=0.02)
    assert 0.85 * AUTO_RATIO * 0.02 <= median(slow.prompt(4000, 8)) <= 1.1 * AUTO_RATIO * 0.02
    assert median(bounded.prompt(800, 8)) <= 1.1 * 0.025
    late = warmed(StepPace(0.01), quiet_s=0.02)  # nothing is left: a prompt advances all the same
    assert [late.step(8, 0, 3000)[0] for _ in range(3)] == [MIN_CHUNK] * 3


@pytest.mark.parametrize(("num_waiting", "times"), [(0, 1), (8, 1), (12, 1.5), (14, 1.75), (1000, 1.75)])
def test_steps_are_longer_while_many_prompts_wait(num_waiting: int, times: float) -> None:
    automatic, bounded = StepPace(), StepPace(0.02)
    for pace in (automatic, bounded):
        pace.note(0, has_decodes=True, seconds=0.005)
        pace.note(1000, has_decodes=True, seconds=0.025)  # 20 us a token
    assert automatic.most_tokens(num_waiting) == pytest.approx(1000 * times)
    assert bounded.most_tokens(num_waiting) == pytest.approx(750)  # a setting holds


def test_rows_that_wait_for_the_weights_do_not_make_later_steps_too_long() -> None:
    """Up to 300 tokens take hardly longer than the weights, then every token 12 us: small prompts say nothing of large
    ones, and a step that is too long is not repeated."""
    pace, steps = StepPace(), []

    def seconds(num_tokens: float) -> float:
        return 0.003 + max(0.0005, 12e-6 * (num_tokens - 200))

    for _ in range(20):
        pace.note(0, has_decodes=True, seconds=0.003)
        pace.note(250, has_decodes=True, seconds=seconds(250))
    for _ in range(20):
        steps.append(seconds(pace.most_tokens(0)))
        pace.note(pace.most_tokens(0), has_decodes=True, seconds=steps[-1])
    assert max(steps) <= 1.02 * AUTO_STEP_SECONDS and steps[-1] >= 0.95 * AUTO_STEP_SECONDS
    for _ in range(3):
        pace.note(6000, has_decodes=True, seconds=seconds(6000))
    assert seconds(pace.most_tokens(0)) <= 1.02 * AUTO_STEP_SECONDS


class Load:
    """20 prompts a step, of 60 tokens behind 1,000 cached ones; a step takes so many seconds, and 8 us a token."""

    def __init__(self, pace: StepPace) -> None:
        self.now, self.budget = 0.0, PrefillBudget(8192, 8 * PARITY, pace, clock=lambda: self.now)

    def step(self, decodes_s: float, most: int = 60) -> tuple[int, float]:
        """Tokens of prompts and seconds."""
        step = step_of(1)
        self.budget.begin_step(step, num_waiting=20)
        num_tokens = sum(self.budget.take(1000, most, 8192) for _ in range(20))
        seconds = decodes_s + 8e-6 * step.prefill_weight
        self.now += seconds
        self.budget.note_done(step)
        return num_tokens, seconds


def test_a_short_first_prompt_does_not_bound_the_later_ones() -> None:
    """Its 20 tokens take as long as their launches."""
    pace = StepPace()
    pace.note(0, has_decodes=True, seconds=0.006)
    pace.note(20, has_decodes=True, seconds=0.008)
    load = Load(pace)
    assert [load.step(0.006)[0] for _ in range(40)][-1] == 1200


def test_short_prompts_alone_are_bounded_too() -> None:
    """A server may have no others: what a few of their tokens take counts until more have been measured."""
    pace = StepPace()
    for _ in range(20):
        pace.note(0, has_decodes=True, seconds=0.006)
        pace.note(MIN_CHUNK - 1, has_decodes=True, seconds=0.1)
    assert pace.most_tokens(0) < MIN_CHUNK


def test_a_ratio_holds_from_the_first_step_of_decodes_alone_on() -> None:
    pace = StepPace(max_ratio=1.5)
    pace.note(1000, has_decodes=True, seconds=0.025)
    assert pace.most_tokens(0) == pytest.approx(1000), "the automatic bound"
    pace.note(0, has_decodes=True, seconds=0.01)
    assert pace.most_tokens(0) == pytest.approx(1000 * 0.005 / 0.025), "15 ms, of which 10 are the decodes'"


def test_decodes_that_became_shorter_are_noticed_beside_prompts() -> None:
    """A step in 64 is without prompts, and measures them."""
    pace = StepPace()
    for _ in range(20):
        pace.note(0, has_decodes=True, seconds=0.1)
    load = Load(pace)
    before = [load.step(0.006, 3000) for _ in range(60)]
    assert min(seconds for _, seconds in before) > 0.06, "three times what decodes took"
    after = [load.step(0.006, 3000) for _ in range(600)]
    assert sum(not num_tokens for num_tokens, _ in after) in (9, 10)
    assert all(0.03 < seconds < 0.046 for num_tokens, seconds in after[300:] if num_tokens)


@pytest.mark.parametrize("num_missing", range(MIN_CHUNK, 4 * MIN_CHUNK, 3))
def test_a_prompt_does_not_end_in_a_short_chunk(num_missing: int) -> None:
    """Up to 64 tokens go to the kernel of decodes, which reads a long context once for every few of them."""
    budget, computed, found = PrefillBudget(200, PARITY), 50_000, []
    while num_missing:
        budget.begin_step(step_of(2))
        found.append(budget.take(computed, num_missing, 4096))
        num_missing, computed = num_missing - found[-1], computed + found[-1]
    assert min(found) >= 64 and max(found) <= MIN_CHUNK and len(found) == -(-sum(found) // MIN_CHUNK)


def test_a_step_that_stalls_changes_little() -> None:
    device = warmed(StepPace())
    device.prompt(6000, 8)
    before = device.step(8, 2000, 3000)[0]
    device.step(8, 2000, 3000, stall_s=2.0)
    device.step(8, 2000, 3000)
    assert device.step(8, 2000, 3000)[0] >= 0.8 * before


def test_a_step_after_an_idle_time_is_measured_from_its_beginning() -> None:
    device = warmed(StepPace())
    before = device.step(8, 0, 3000)[0]
    for _ in range(8):
        device.idle(5.0)
        device.step(0, 0, 1000)
    assert device.step(8, 0, 3000)[0] >= 0.5 * before


def test_what_the_device_has_measured_counts() -> None:
    """The host launches the next step for so long that it sees this one end late; and nothing was to do before it."""

    class Noting(StepPace):
        def note(self, weight: float, has_decodes: bool, seconds: float, is_layered: bool = False) -> None:
            found.append((weight, seconds))

    now, found = [1.0], list[tuple[float, float]]()
    budget = PrefillBudget(600, pace=Noting(), clock=lambda: now[0])
    for device_s, read_at, samples in (
        (0.03, 1.5, True),
        (None, 1.6, True),
        (0.9, 1.7, True),
        (None, 1.71, False),  # no result waits for it, so its time is the next one's
        (0.25, 2.0, True),
    ):
        step = step_of(1)
        budget.begin_step(step)
        step.requests.append(make_request(3))
        step.samples, step.prefill_weight = [samples], 7.0
        now[0], step.device_s = read_at, device_s
        budget.note_done(step)
    assert found == [(7, pytest.approx(one)) for one in (0.03, 0.1, 0.1)] + [(14, 0.25)]


def test_decodes_that_become_fewer_are_measured_at_once() -> None:
    """Else a bound in decodes' times would hold for those that have ended."""
    pace = StepPace(0.0, 1.5)
    device = warmed(pace, quiet_s=0.02, parity=math.inf)
    device.prompt(5000, 8)
    device.quiet_s, found = 0.008, []
    while len(found) < 30:
        found.append(device.step(2, 1000, 30_000))
    assert found[0][0] == 0 and found[1][0] > 0, "one of decodes alone"
    assert max(seconds for _, seconds in found[3:]) < 1.7 * 0.008


def test_decodes_that_become_fewer_one_by_one_are_measured_too() -> None:
    """Steps with prompts do not move what their number is compared with."""
    device = warmed(StepPace())
    computes = {num_decodes: device.step(num_decodes, 0, 3000)[0] > 0 for num_decodes in (8, 7, 6, 5, 4)}
    assert computes == {8: True, 7: True, 6: True, 5: False, 4: True}


def test_a_step_that_is_done_holds_nothing() -> None:
    """Adapters that clients send count against a limit for as long as somebody has them."""
    budget, step = PrefillBudget(600), step_of(1)
    step.requests[0].adapter = Adapter("sent", 1, {})
    held = weakref.ref(step.requests[0].adapter)
    budget.begin_step(step)
    budget.note_done(step)
    del step
    assert held() is None


def test_the_scheduler_measures_its_steps() -> None:
    llm = make_llm(max_num_batched_tokens=600, num_blocks=2000, max_model_len=6000)
    now = [0.0]
    llm.scheduler.prefill_budget = PrefillBudget(600, math.inf, StepPace(0.02), clock=lambda: now[0])
    commit = llm.scheduler.commit

    def slow_commit(step: ScheduledStep, sampled: list[list[int]]) -> list[StepOutput]:
        now[0] += 0.01 + 1e-4 * (step.total_num_scheduled_tokens - step.num_decodes)
        return commit(step, sampled)

    llm.scheduler.commit = slow_commit  # type: ignore[method-assign]
    llm.scheduler.add(make_request(500, 2000))
    llm.step()
    llm.step()
    llm.scheduler.add(prompt := make_request(3000, 4))
    found = [new for _, new, _ in chunks(llm, prompt)]
    assert sum(found) == 3000
    assert all(MIN_CHUNK <= new <= 160 for new in found[:-2]), found  # 100 tokens fit 20 ms


def test_a_bound_that_is_set_holds_on_a_cpu_too() -> None:
    is_paced = [PrefillBudget.of(SchedulerConfig(max_mixed_step_ms=ms))._pace is not None for ms in (0, 30)]
    is_paced.append(PrefillBudget.of(SchedulerConfig(max_mixed_step_ratio=1.5))._pace is not None)
    assert is_paced == [False, True, True]
    pace = PrefillBudget.of(SchedulerConfig(max_mixed_step_ms=30))._pace
    assert pace is not None
    pace.note(1000, has_decodes=True, seconds=0.06)
    assert pace.most_tokens(0) == pytest.approx(500)
    whole = SchedulerConfig(max_mixed_step_ms=30, enable_chunked_prefill=False)
    assert PrefillBudget.of(whole)._pace is None
