"""What steps are expected to take, from times measured at start and what they took since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from slipstream.core.request import Request
from slipstream.core.speculation import DraftPlanner, MeasuredStep, Speculation
from slipstream.core.step_costs import StepCosts, Surplus


def test_what_steps_take_beyond_their_costs_is_kept_by_rows() -> None:
    surplus = Surplus()
    for _ in range(200):
        surplus.note_plain(1.2, 1.0)
        surplus.note_verified(64, 4, 2.4, 2.0)
    assert surplus.plain == pytest.approx(0.2, abs=0.01)
    assert surplus.verified(64, 4) == pytest.approx(0.4, abs=0.01)
    assert surplus.verified(34, 4) == pytest.approx(0.3, abs=0.01), "half-way between a plain step and that"
    assert surplus.verified(124, 4) == pytest.approx(0.6, abs=0.02)
    for _ in range(200):
        surplus.note_verified(32, 4, 2.5, 2.0)
    assert surplus.verified(32, 4) == pytest.approx(0.5, abs=0.01), "its own word counts"
    assert surplus.verified(128, 4) >= surplus.verified(64, 4)
    surplus.note_verified(32, 4, 50.0, 2.0)
    assert surplus.verified(32, 4) < 0.6, "one step that compiled something"
    for _ in range(5000):
        surplus.note_verified(64, 4, 2.4, 2.0)
    assert surplus.verified(32, 4) == pytest.approx(0.2 + 0.2 * 28 / 60, abs=0.02), "long ago"
    surplus.decay()
    assert surplus.verified(64, 4) < 0.4


def test_three_steps_tell_what_steps_take_and_one_does_not() -> None:
    """A run of 250 tokens is over before a slowly moving mean knows that a verification takes twice what it should."""
    surplus = Surplus()
    surplus.note_verified(64, 4, 50.0, 2.0)
    assert surplus.verified(64, 4) == 0.0, "it compiled something"
    for _ in range(3):
        surplus.note_verified(64, 4, 4.0, 2.0)
    assert surplus.verified(64, 4) == 2.0


def test_a_plain_step_that_was_not_measured_has_no_surplus_of_its_own() -> None:
    """What the host takes for a verification, which it reads before the next, it does not take for a plain step. Short
    contexts make both faster."""
    slower, faster = Surplus(), Surplus()
    for _ in range(5):
        slower.note_verified(64, 4, 2.5, 2.0)
        faster.note_verified(64, 4, 1.5, 2.0)
    assert slower.plain == 0.0 and faster.plain == -0.5
    slower.note_plain(1.25, 1.0)
    faster.note_plain(1.25, 1.0)
    assert slower.plain == faster.plain == 0.0, "an estimate counts as one measurement, and the lower one of two holds"


SMALL = StepCosts(  # SmolLM2-135M on one H200: behind 1,024 tokens, which take a third of a plain step
    plain=((64, 1.46e-3),),
    verified=((256, 64, 4, 1.50e-3),),
    drafting={"mtp": ((64, 0.19e-3),)},
    cached_token=0.4e-3 / (64 * 1024),
    context=1024,
)


@pytest.mark.parametrize(("context", "seconds", "has_drafts"), [(100, 2.06e-3, False), (1024, 2.1e-3, True)])
def test_contexts_decide_whether_drafts_of_a_small_model_pay(context: int, seconds: float, has_drafts: bool) -> None:
    """Behind 100 tokens a plain step takes 1.1 ms, and a verification what the host takes: 1.62 tokens do not pay, and
    no plain step has to be made to know it."""
    planner = DraftPlanner(is_adaptive=True, costs=SMALL)
    request = cast(Request, SimpleNamespace(speculation=Speculation("mtp", 3, "exact")))
    assert SMALL.seconds(64, 64, "", 100) == pytest.approx(1.1e-3, rel=0.01)
    assert SMALL.seconds(64, 64, "", 2048) == pytest.approx(1.86e-3, rel=0.01)
    for _ in range(20):
        for number in range(64):
            planner.observe("mtp", 3, [0, 1] if number % 8 < 5 else [0])
        planner.measure(MeasuredStep(64, 256, seconds, 1.62, "mtp", context))
        planner.begin_step(64)
        number = planner.num_drafts(request)
    assert bool(number) == has_drafts
    assert planner._load(64).surplus._plain.count == 0


def test_drafts_that_are_seldom_found_are_expected_to_be() -> None:
    """One request of ten finds n-grams, and they are right: a step of all brings 1.5 tokens, not 6, and has 96 rows."""
    costs = StepCosts(((64, 1.1e-3),), ((128, 64, 6, 1.2e-3), (384, 64, 6, 1.7e-3)), {})
    planner = DraftPlanner(is_adaptive=True, costs=costs)
    request = cast(Request, SimpleNamespace(speculation=Speculation("ngram", 5, "exact")))
    planner.begin_step(64)
    assert planner.promises("ngram", 5)[5] == pytest.approx(planner._gains["ngram"].expected_tokens(5)[5] / 1.7e-3)
    for _ in range(100):
        planner.observe("ngram", 5, range(6))
        for _ in range(9):
            planner.observe("ngram", 5, [0])
        planner.note_found("ngram", 50, 5)
    assert planner.promises("ngram", 5)[5] == pytest.approx(1.5 / 1.2e-3, rel=0.05)
    planner.begin_step(64)
    assert planner.num_drafts(request) == 5
    for _ in range(20):
        planner.measure(MeasuredStep(64, 96, 2.5e-3, 1.5, "ngram"))
        planner.begin_step(64)
    assert planner.num_drafts(request) == 0, "with what the host takes"


def test_a_verification_of_many_requests_is_not_judged_by_one_of_few() -> None:
    """64 rows of 32 requests read the keys of 32 contexts, a tree of 64 rows those of one."""
    costs = StepCosts(
        plain=((1, 4.0), (32, 6.0)),
        verified=((64, 1, 64, 5.0), (64, 32, 32, 7.0), (128, 4, 64, 6.5)),
        drafting={"medusa": ((1, 0.5), (32, 1.0))},
    )
    assert costs.seconds(1, 64, "medusa") == 5.5
    assert costs.seconds(20, 60, "medusa") == 8.0
    assert costs.seconds(2, 64, "ngram") == 7.0 and costs.padded_rows(65, 2) == 128
    assert costs.seconds(1, 1, "medusa") == 4.5, "nothing is verified, but drafted"
    assert costs.seconds(32, 200, "medusa") is None and costs.seconds(33, 33, "") is None
