"""Runs of verifications in an engine: requests of all kinds come and go beside them, are cancelled and preempted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Told, make_engine, run_steps
from slipstream.core.config import SpeculationConfig
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.core.step import ScheduledStep
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.ngram import NgramProposer

WRONG = 5  # a token that is rare in the tests' texts
NUM_REQUESTS = 36
PLAIN = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.8, "seed": 4, "n": 2},
    {"logprobs": 2},
    {"stop_token_ids": tuple(range(100, 160))},
    {"stop_words_ids": ((110,), (111,))},
    {"min_tokens": 9, "stop_token_ids": tuple(range(60, 220))},
    {"repetition_penalty": 1.2},
    {"num_draft_tokens": 2},
    {"guide": Guide("regex", "[a-z ]{6,18}"), "ignore_eos": False},
]


def _any_params(dice: random.Random) -> SamplingParams:
    changes: dict[str, Any] = dice.choice(OTHERS) if dice.random() < 0.25 else {}
    return replace(PLAIN, max_tokens=dice.choice([9, 24, 40]), **changes)


def _plain_texts(
    checkpoint: Path, prompts: list[list[int]], wanted: list[SamplingParams]
) -> dict[tuple[int, int], list[int]]:
    """By handle and sequence, each request alone and without drafts."""
    engine, texts = make_engine(checkpoint), dict[tuple[int, int], list[int]]()
    for handle, params in enumerate(wanted):
        told: dict[Request, Told] = {}
        engine.submit(Request(list(prompts[handle % 12]), replace(params, num_draft_tokens=None), handle=handle))
        run_steps(engine, told)
        texts |= {(one.handle, one.sequence_index): news.token_ids for one, news in told.items()}
    return texts


@pytest.mark.parametrize("num_blocks", [26, 512])
def test_texts_are_those_of_plain_decoding(
    num_blocks: int, tiny_llama: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(num_blocks)
    wanted = [_any_params(dice) for _ in range(NUM_REQUESTS)]
    texts = _plain_texts(tiny_llama, prompts, wanted)
    submitted: dict[int, Request] = {}  # by sequence id

    def drafted(proposer: NgramProposer, state: RequestState, num_drafts: int) -> Sequence[int]:
        """Some of what follows, perhaps a wrong token behind it."""
        request = submitted[state.sequence_id]
        assert state.token_ids == request.token_ids, "the worker knows the text"
        right = texts[request.handle, request.sequence_index][request.num_output_tokens :][: dice.randint(0, 5)]
        return [*right, *([WRONG] if dice.random() < 0.3 else [])][:num_drafts]

    monkeypatch.setattr(NgramProposer, "_continue", drafted)
    engine = make_engine(
        tiny_llama,
        {"max_model_len": 160},
        {"num_blocks": num_blocks},
        {"max_num_batched_tokens": 64, "overlap_scheduling": "on"},
        SpeculationConfig(methods="ngram", throttle="off"),
    )
    steps: list[ScheduledStep] = []
    schedule = engine.scheduler.schedule

    def noted(admits: bool = True) -> ScheduledStep:
        steps.append(schedule(admits))
        return steps[-1]

    monkeypatch.setattr(engine.scheduler, "schedule", noted)
    found: dict[Request, Told] = {}
    cancelled: set[int] = set()
    handles = list(range(NUM_REQUESTS))
    while handles or engine.has_work:
        while handles and dice.random() < 0.4:
            handle = handles.pop(0)
            own = engine.submit(Request(list(prompts[handle % 12]), wanted[handle], handle=handle))
            submitted |= {one.sequence_id: one for one in own}
        if dice.random() < 0.08 and (live := list(engine.scheduler.live_requests)):
            cancelled.add(handle := dice.choice(live).handle)
            engine.cancel(handle)
        run_steps(engine, found, 1)
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0
    for request in submitted.values():
        text = texts[request.handle, request.sequence_index]
        count = len(request.output_token_ids) if request.handle in cancelled else len(text)
        assert request.output_token_ids == text[:count], wanted[request.handle]
    assert sum(step.verified is not None and any(step.num_drafts) for step in steps) > 20
    assert any(step.preempted for step in steps) == (num_blocks < 100)
    assert not engine._inputs._readers and not engine._inputs._num_sent_tokens
