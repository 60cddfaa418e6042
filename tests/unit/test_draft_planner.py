"""The planner on a server that takes the seconds one H200 took: what it chooses, and that it stays there."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from simulated_server import SimulatedServer
from slipstream.core.finish import StopConditions
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.speculation import (
    DraftGains,
    DraftPlanner,
    MeasuredStep,
    Speculation,
    VerifiedDrafts,
    _Load,
    truncate_drafts,
)
from slipstream.core.stats import Stats, accepted_metric, drafted_metric
from slipstream.core.step_costs import StepCosts
from slipstream.worker.spec_decode.medusa import default_choices

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from profiles import PROFILES

MTP_CHAIN = [(0,), (0, 0), (0, 0, 0)]
TREES = {"mtp": MTP_CHAIN, "medusa": default_choices(4)}
LOADS = (1, 2, 3, 4, 8, 16, 32, 48, 64, 80, 96, 128)


def server(method: str, seed: int = 0) -> SimulatedServer:
    return SimulatedServer(method, TREES[method], PROFILES[method], seed)


@pytest.mark.parametrize("num_requests", LOADS)
@pytest.mark.parametrize("method", TREES)
def test_no_load_is_slower_than_plain_and_none_oscillates(method: str, num_requests: int) -> None:
    """The planner finds nearly the best speed of a load by its own measurements, and then keeps its choice."""
    simulated = server(method)
    planner = DraftPlanner(is_adaptive=True, costs=simulated.costs)
    tally = simulated.run(planner, num_requests, 400)
    plain = 1.0 / simulated.seconds(num_requests, 0, False)
    rows = [num_requests * (2 + place) for place in range(len(TREES[method]))]
    numbers = [1 + place for place, count in enumerate(rows) if simulated.costs.seconds(num_requests, count, method)]
    best = max(simulated.expected(number) / simulated.seconds(num_requests, number, True) for number in numbers)
    found = tally.tokens / tally.seconds
    assert found >= 0.98 * plain
    assert found >= 0.94 * max(best, plain), "a hundredth is the noise's, three the chance's"
    assert tally.num_changes <= 2


@pytest.mark.parametrize("method", TREES)
def test_no_plan_is_slower_than_plain_by_the_planners_own_estimate(method: str) -> None:
    """At every decision, whatever the load does."""
    simulated = server(method)
    planner = DraftPlanner(is_adaptive=True, costs=simulated.costs)
    most = len(TREES[method])
    num_drafting = num_plain = 0
    for num_requests in (1, 2, 4, 8, 128, 96, 64, 100, 3, 128, 33, 17, 126, 1, -128, -4):
        if num_requests < 0:  # texts that could not be foretold
            num_requests, simulated.rates = -num_requests, [[0.02] * len(level) for level in simulated.rates]
        for _ in range(6):
            simulated.run(planner, num_requests, 15)
            planner.begin_step(num_requests)
            planner._best.clear()
            number = planner.num_drafts(simulated.request)
            if number:
                promised = planner.promises(method, most)
                assert promised[number] >= promised[0]
            num_drafting, num_plain = num_drafting + bool(number), num_plain + (not number)
    assert num_drafting > 10 and num_plain > 5


def test_few_requests_get_smaller_trees_than_an_empty_cache_promises() -> None:
    """A tree's rows cost more the longer the context: at 2 requests 15 drafts look best by the seconds of a shorter one
    than they have; 7 are."""
    simulated = server("medusa")
    planner = DraftPlanner(is_adaptive=True, costs=simulated.costs)
    simulated.run(planner, 2, 1)
    first = planner.num_drafts(simulated.request)
    tally = simulated.run(planner, 2, 400)
    assert first == 15 and set(tally.chosen[200:]) == {7}
    at_15 = simulated.expected(15) / simulated.seconds(2, 15, True)
    assert tally.tokens / tally.seconds > 1.03 * at_15


def test_load_that_comes_and_goes_finds_its_drafts_again() -> None:
    simulated = server("medusa")
    planner = DraftPlanner(is_adaptive=True, costs=simulated.costs)
    simulated.run(planner, 4, 200)
    before = simulated.run(planner, 4, 32).chosen[-1]
    simulated.run(planner, 128, 200)
    assert simulated.run(planner, 4, 32).chosen[-1] == before > 0


@pytest.mark.parametrize("method", TREES)
def test_drafts_come_back_after_texts_that_could_not_be_foretold(method: str) -> None:
    """Steps take just what they took at start, so acceptance alone keeps the planner from drafting."""
    good = PROFILES[method]
    simulated = SimulatedServer(method, TREES[method], good, surplus_share=0.0)
    planner = DraftPlanner(is_adaptive=True, costs=simulated.costs)
    simulated.rates = [[0.02] * len(level) for level in good]
    bad = simulated.run(planner, 4, 2000)
    assert sum(map(bool, bad.chosen[1000:])) < 50, "hardly tried while they do not pay"
    simulated.rates = good
    again = simulated.run(planner, 4, 20_000)
    assert all(again.chosen[-1000:])


def test_what_was_found_out_about_long_lists_stays_while_short_ones_are_drafted() -> None:
    """A thousand requests fill the counts within some steps: those of drafts that nobody makes now must not fade."""
    gains = DraftGains()
    for _ in range(400):
        gains.add(6, [0, 1])
    assert gains.expected_tokens(6)[6] == pytest.approx(2.0, abs=0.2)
    for _ in range(100):
        for _ in range(400):
            gains.add(1, [0, 1])
        assert gains.expected_tokens(6)[6] == pytest.approx(2.0, abs=0.2)
    for _ in range(8000):
        gains.add(6, [0, 1, 2])
        gains.expected_tokens(6)
    assert gains.expected_tokens(6)[2] > 2.9, "but new ones count"


def test_a_draft_that_was_never_seen_is_not_thought_better_than_the_one_before_it() -> None:
    gains = DraftGains()
    for number in range(1000):
        gains.add(2, [0, 1] if number % 10 == 0 else [0])
    tokens = gains.expected_tokens(4)
    assert tokens[3] - tokens[2] <= tokens[2] - tokens[1] + 1e-9 < 0.02


def test_speculation_is_not_paused_for_the_spread_of_its_tokens() -> None:
    """A quarter of the verifications brings 4 tokens, the others 1: 1.75 a step, though the mean of their quotients is
    less than plain steps'. One step that took a second pauses nothing either."""
    planner = DraftPlanner(is_adaptive=True)
    planner.measure(MeasuredStep(1, 4, 1.0, 1.0, "mtp"))
    for step in range(200):
        planner.measure(MeasuredStep(1, 4, 0.0055, 4.0 if step % 4 == 0 else 1.0, "mtp"))
    for _ in range(40):
        planner.measure(MeasuredStep(1, 1, 0.004, 1.0))
    assert not planner._load(1).num_pause_steps
    slow = DraftPlanner(is_adaptive=True)
    for _ in range(40):
        slow.measure(MeasuredStep(1, 1, 0.004, 1.0))
        slow.measure(MeasuredStep(1, 4, 0.0045, 1.0, "mtp"))
    assert slow._load(1).num_pause_steps


def test_a_request_has_no_more_rows_than_its_graph_allows() -> None:
    """Seven requests fit into the graph of eight with 16 rows each, and 18 rows of each would be 126 of its 128: but a
    step with 18 rows of a request runs without a graph."""
    costs = StepCosts(plain=((8, 4.4e-3),), verified=((64, 8, 8, 5.1e-3), (128, 8, 16, 5.5e-3)), drafting={})
    planner = DraftPlanner(is_adaptive=True, costs=costs)
    planner.begin_step(7)
    assert set(planner.promises("medusa", 63)) == {0, 7, 15}
    assert costs.seconds(7, 126, "medusa") is None and costs.seconds(7, 112, "medusa") == 5.5e-3


def test_no_step_is_thought_to_take_nothing() -> None:
    """A large verification took 8 ms less than at start: of one of 5 ms that is beside it not as much is left off."""
    costs = StepCosts(plain=((8, 4e-3),), verified=((448, 8, 56, 5e-3), (512, 8, 64, 20e-3)), drafting={})
    planner = DraftPlanner(is_adaptive=True, costs=costs)
    planner.begin_step(8)
    for _ in range(200):
        planner.measure(MeasuredStep(8, 512, 11e-3, 2.0, "medusa"))
    rates = planner.promises("medusa", 63)
    assert set(rates) == {0, 55, 63} and all(0.0 < rate <= 64 / 2.5e-3 for rate in rates.values())


def test_a_small_model_whose_steps_are_the_hosts_is_judged_by_them() -> None:
    """The device takes 0.3 ms and the host 1.0, or 1.6 around drafts that bring a third more: not worth it."""
    costs = StepCosts(((1, 0.3e-3),), ((4, 1, 4, 0.33e-3),), {"mtp": ((1, 0.05e-3),)})
    planner = DraftPlanner(is_adaptive=True, costs=costs)
    request = Request([1], SamplingParams())
    request.speculation = Speculation("mtp", 3, "exact")
    chosen = []
    for step in range(600):
        planner.begin_step(1)
        num_drafts = planner.num_drafts(request)
        if num_drafts:
            planner.observe("mtp", 3, [0, 1] if step % 3 == 0 else [0])
            planner.measure(MeasuredStep(1, 4, 1.6e-3, 4 / 3, "mtp"))
        else:
            planner.measure(MeasuredStep(1, 1, 1.0e-3, 1.0))
        chosen.append(num_drafts)
    assert chosen[0] == 3 and set(chosen[300:]) == {0}


def test_tries_that_are_given_up_soon_come_ever_less_often() -> None:
    """Verifications take 10 ms more than was measured at start, which decays step by step: a retry costs a draft model
    all contexts, so the second hour may not have as many as the first minutes."""
    costs = StepCosts(plain=((64, 7e-3),), verified=((320, 64, 5, 12e-3),), drafting={"draft_model": ((64, 2e-3),)})
    planner = DraftPlanner(is_adaptive=True, costs=costs)
    request = SimpleNamespace(speculation=Speculation("draft_model", 4, "exact"))
    drafting = []
    for step in range(60_000):
        planner.begin_step(64)
        count = planner.num_drafts(cast(Request, request))
        if count:
            drafting.append(step)
            planner.observe("draft_model", count, [0, 1, 2])
            planner.measure(MeasuredStep(64, 64 * (1 + count), 24e-3, 3.0, "draft_model"))
        else:
            planner.measure(MeasuredStep(64, 64, 7e-3, 1.0))
    tries = [step for before, step in zip([-100, *drafting], drafting) if step > before + 1]
    assert len(tries) >= 3, "it is tried again"
    assert len(drafting) < 0.01 * 60_000
    waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert waits[-1] > 4 * waits[0], "but later and later"


def test_a_try_that_lasted_was_not_in_vain() -> None:
    load = _Load()
    for _ in range(5):
        load.note_drafting(is_worthwhile=True, was_drafting=False)
        load.note_drafting(is_worthwhile=False, was_drafting=True)
    assert load.backoff == 16
    for _ in range(64):
        load.note_drafting(is_worthwhile=True, was_drafting=True)
    load.note_drafting(is_worthwhile=False, was_drafting=True)
    assert load.backoff == 1
    for _ in range(100):
        load.note_drafting(is_worthwhile=False, was_drafting=True)
    assert load.backoff == 64, "and no more than that"


@pytest.mark.parametrize(("num_good", "pauses"), [(5000, [1024] * 4), (0, [1024, 2048, 4096, 8192])])
def test_without_costs_a_pause_is_short_after_drafts_that_paid_for_long(num_good: int, pauses: list[int]) -> None:
    """Verifications bring 3 tokens num_good times, then one each until they are paused."""
    planner = DraftPlanner(is_adaptive=True)
    request = Request([1], SamplingParams())
    request.speculation = Speculation("ngram", 4, "exact")
    found, num_plain, num_drafting = [], 0, 0
    for _ in range(40):
        planner.measure(MeasuredStep(4, 4, 4e-3, 1.0))
    while len(found) < len(pauses):
        planner.begin_step(4)
        if planner.num_drafts(request):
            if num_plain:
                found.append(num_plain)
                num_plain = num_drafting = 0
            num_drafting += 1
            planner.measure(MeasuredStep(4, 20, 6e-3, 3.0 if num_drafting <= num_good else 1.0, "ngram"))
        else:
            num_plain += 1
            planner.measure(MeasuredStep(4, 4, 4e-3, 1.0))
    assert found == pauses


@pytest.mark.parametrize(("empty_share", "pays"), [(0.75, False), (0.2, True)])
def test_steps_in_which_ngrams_find_nothing_count_against_them(empty_share: float, pays: bool) -> None:
    """They wait for the host as verifications do: 1.16 ms instead of 0.66, as one H200 took with 135 M parameters."""
    costs = StepCosts(((1, 0.66e-3),), ((6, 1, 6, 0.79e-3),), {"ngram": ()})
    planner = DraftPlanner(is_adaptive=True, costs=costs)
    request = Request([1], SamplingParams())
    request.speculation = Speculation("ngram", 5, "exact")
    num_drafting = 0
    for step in range(1000):
        planner.begin_step(1)
        if not planner.num_drafts(request):
            planner.measure(MeasuredStep(1, 1, 0.66e-3, 1.0))
            continue
        num_drafting += 1
        if step % 20 < 20 * empty_share:
            planner.measure(MeasuredStep(1, 1, 1.16e-3, 1.0, "ngram"))
        else:
            planner.observe("ngram", 5, [0, 1, 2, 3])
            planner.measure(MeasuredStep(1, 6, 1.28e-3, 4.0, "ngram"))
    assert num_drafting == 1000 if pays else num_drafting < 100


def test_a_number_of_drafts_changes_for_a_gain_and_what_is_given_up_comes_back_later() -> None:
    """A change discards the verification that was launched ahead: 2 % more is within what steps differ by."""
    planner = DraftPlanner(is_adaptive=True, costs=StepCosts((), (), {}))
    request = cast(Request, SimpleNamespace(speculation=Speculation("medusa", 7, "exact")))
    found, rates = [], dict[int, float]()
    planner.promises = lambda method, most: dict(rates)  # type: ignore[method-assign]
    for plain, three, seven in (
        (100, 150, 151),
        (100, 154, 151),
        (100, 156, 151),
        (155, 156, 151),
        (157, 156, 151),
    ) * 2:
        rates.update({0: plain, 3: three, 7: seven})
        for _ in range(16):  # decisions are made once in so many steps
            planner.begin_step(4)
            chosen = planner.num_drafts(request)
        found.append(chosen)
    assert found == [7, 7, 3, 3, 0] * 2 and planner._load(4).backoff == 2


def test_more_requests_than_were_measured_at_start_are_served_plainly() -> None:
    costs = StepCosts(plain=((2, 4e-3),), verified=((8, 2, 4, 5e-3),), drafting={"mtp": ((2, 1e-3),)})
    planner = DraftPlanner(is_adaptive=True, costs=costs)
    request = cast(Request, SimpleNamespace(speculation=Speculation("mtp", 3, "exact")))
    for num_running, expected in ((2, 3), (3, 0), (2, 3)):
        planner.begin_step(num_running)
        assert planner.num_drafts(request) == expected
        for method in ("", "mtp"):
            planner.measure(MeasuredStep(num_running, num_running, 5e-3, 1.0, method))


@pytest.mark.parametrize("parents", [[], [-1, -1, 0]])
@pytest.mark.parametrize(("most", "expected"), [(5, 3), (2, 2), (1, 1), (0, 0), (-2, 0)])
def test_no_more_drafts_are_verified_than_have_room(parents: list[int], most: int, expected: int) -> None:
    for num_left, by_length in ((100, expected), (2, min(1, expected)), (1, 0)):
        request = Request([1, 2, 3], SamplingParams(max_tokens=num_left))
        request.stop_conditions = StopConditions(request, 1000)
        request.draft_token_ids, request.draft_parents = [4, 5, 6], list(parents)
        assert truncate_drafts(request, most) == by_length
        assert request.draft_token_ids == [4, 5, 6][:by_length] and request.draft_parents == parents[:by_length]


def test_drafts_stop_where_one_would_be_left_and_begin_again_at_three() -> None:
    """One does not pay for its verification, and what stops at two would come and go with each request."""
    planner, found = DraftPlanner(free_tokens=12), []
    request = Request([1, 2, 3], SamplingParams(max_tokens=4))
    request.speculation = Speculation("ngram", 8, "exact")
    for num_running in (1, 4, 6, 4, 3, 4, 12, 24):
        planner.begin_step(num_running)
        found.append(planner.num_drafts(request))
    assert found == [8, 2, 0, 0, 3, 2, 0, 0]


@pytest.mark.parametrize(("parents", "drafted"), [([], [1, 1, 1, 0]), ([-1, 0, 0], [1, 1, 0, 0])])
def test_verified_drafts_are_counted_by_their_place(parents: list[int], drafted: list[int]) -> None:
    stats, request = Stats(), Request([1, 2, 3], SamplingParams(max_tokens=8))
    request.speculation = Speculation("ngram", 8, "exact")
    request.draft_token_ids, request.draft_parents = [4, 5, 6], parents
    verified = VerifiedDrafts()
    verified.add(request, 2)
    verified.record(stats)
    counts = stats._values.counts
    assert [counts.get(drafted_metric("ngram", place), 0) for place in range(1, 5)] == drafted
    assert [counts.get(accepted_metric("ngram", place), 0) for place in range(1, 5)] == [1, 0, 0, 0]
    assert (request.num_drafted_tokens, request.num_accepted_tokens, request.draft_token_ids) == (3, 1, [])


@pytest.mark.parametrize(
    ("num_empty", "plain_s", "num_steps", "expected"),
    [
        (33, 0.01, 64, True),
        (17, 0.01, 32, True),
        (32, 0.01, 64, False),
        (64, 0.03, 64, False),
        (64, 0.02, 64, False),
        (1, 0.01, 1, False),
    ],
)
def test_plain_steps_are_tried_where_most_have_no_drafts_and_take_longer(
    num_empty: int, plain_s: float, num_steps: int, expected: bool
) -> None:
    load = _Load()
    for _ in range(num_steps):
        load.speculating.add(0.02, 1.0)
    load.num_empty = num_empty
    assert load.needs_trial(plain_s) is expected
