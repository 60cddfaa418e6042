"""Requests of drawn settings, one after the other into an engine of drawn parameters: each says what it says alone in a
plain engine.

What a single test does not reach is drawn: chunks, preemption, cached beginnings, blocks in host memory, drafts,
windows and all kinds of requests at once, in another mixture for each seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, Told, make_engine, run_all, run_steps
from prompted_heads import Prompter
from slipstream.core.config import SpeculationConfig
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine
from tiny_heads import speculation
from tiny_model import make_tiny_llama, make_tiny_windowed

MAX_MODEL_LEN = 96
NUM_REQUESTS = 10
SEEDS = (1, 5, 8, 13, 15, 18, 20, 23)  # both models, every method, each of what the last test asks for
METHODS = ("", "ngram", "draft_model", "medusa", "mtp", "eagle", "eagle3")
GUIDES = (Guide("regex", "[a-z ]{3,9}"), Guide("regex", "(ab|cd|e)*"), Guide("json"))
NUM_GROUPS = {"llama": 1, "windowed": 4}  # KV groups, each of which needs blocks for a sequence


@dataclass
class Asked:
    """A request, and the step before which it comes. cancel_after: its tokens after which it is cancelled; 0: not."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    cancel_after: int = 0


@dataclass
class Run:
    asked: list[Asked]
    expected: list[Told]
    found: list[Told] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny_llama(root / "llama", num_layers=3),
        "windowed": make_tiny_windowed(root / "windowed"),
    }


def draw_params(dice: random.Random) -> SamplingParams:
    drawn: dict[str, Any] = {"max_tokens": dice.choice([1, 2, 24, 32, 40]), "ignore_eos": dice.random() < 0.7}
    if dice.random() < 0.5:
        drawn |= {"temperature": dice.choice([0.5, 1.0]), "seed": dice.randrange(1 << 40), "top_k": dice.choice([0, 9])}
    rare: dict[str, Any] = {
        "logprobs": dice.choice([0, 2]),
        "prompt_logprobs": dice.choice([0, 2]),
        "repetition_penalty": dice.choice([0.8, 1.3]),
        "frequency_penalty": 0.4,
        "logit_bias": tuple((dice.randrange(3, 420), 4.0) for _ in range(4)),
        "bad_words_ids": tuple((dice.randrange(3, 420), dice.randrange(3, 420)) for _ in range(90)),
        "allowed_token_ids": tuple(range(1, 90)),
        "stop_token_ids": tuple(dice.sample(range(3, 420), 20)),
        "min_tokens": dice.randrange(drawn["max_tokens"] + 1),
        "guide": dice.choice(GUIDES),
    }
    return replace(GREEDY, **drawn, **{name: value for name, value in rare.items() if dice.random() < 0.15})


def draw_requests(dice: random.Random, block_size: int) -> list[Asked]:
    """Many begin alike; some are a whole number of blocks long, as long as may be, or one token."""
    stem = [dice.randrange(3, 420) for _ in range(MAX_MODEL_LEN)]
    asked: list[Asked] = []
    for _ in range(NUM_REQUESTS):
        length = dice.choice(
            [1, block_size, 2 * block_size, MAX_MODEL_LEN - 1, *(dice.randrange(1, 60) for _ in "1234")]
        )
        shared = dice.choice([0, length, dice.randrange(length + 1)])
        prompt = stem[:shared] + [dice.randrange(3, 420) for _ in range(length - shared)]
        if asked and dice.random() < 0.2:
            prompt = list(dice.choice(asked).prompt)
        cancel_after = dice.choice([0] * 7 + [1, 9])
        asked.append(Asked(prompt, draw_params(dice), dice.choice([0, 0, 1, 4, 9, 20]), cancel_after))
    return asked


def draw_engine(dice: random.Random, model: str, path: Path, block_size: int, folder: Path) -> Engine:
    num_blocks = int(-(-MAX_MODEL_LEN // block_size) * NUM_GROUPS[model] * dice.choice([1, 1, 1.3]))
    caches = dice.random() < 0.8
    cache_config = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "enable_prefix_caching": caches,
        "host_memory_bytes": dice.choice([0, 1 << 20]) if caches and model == "llama" else 0,
    }
    scheduler = {
        "max_num_batched_tokens": dice.choice([9, 17, 64, 256]),
        "max_num_seqs": dice.choice([2, 4, 16]),
        "policy": dice.choice(["max_utilization", "max_utilization", "guaranteed_no_evict"]),
        "overlap_scheduling": dice.choice(["on", "off"]),
    }
    method = dice.choice(METHODS)
    drafts: SpeculationConfig | None = speculation(method, path, folder) if method else None
    return make_engine(path, {"max_model_len": MAX_MODEL_LEN}, cache_config, scheduler, drafts)


def run_staggered(engine: Engine, asked: list[Asked], expected: list[Told]) -> tuple[list[Told], list[Request]]:
    """Each request has what is expected of it as its reference, from which n-grams are drafted."""
    drafts = bool(engine._drafting.proposers)
    requests = [
        Request(
            list(one.prompt), replace(one.params, reference_ids=tuple(alone.token_ids) if drafts else ()), handle=number
        )
        for number, (one, alone) in enumerate(zip(asked, expected))
    ]
    told: dict[Request, Told] = {request: Told() for request in requests}
    waiting = sorted(range(len(asked)), key=lambda number: asked[number].arrival)
    cancelled: set[int] = set()
    step = 0
    while waiting or engine.has_work:
        while waiting and (asked[waiting[0]].arrival <= step or not engine.has_work):
            engine.submit(requests[waiting.pop(0)])
        run_steps(engine, told, 1)
        for number, one in enumerate(asked):
            if 0 < one.cancel_after <= len(told[requests[number]].token_ids) and number not in cancelled:
                cancelled.add(number)
                engine.cancel(number)
        step += 1
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0
    engine.scheduler.cache.pool.check()
    return [told[request] for request in requests], requests


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> object:
    """Seed -> its run; each is made once."""

    @cache
    def run_of(seed: int) -> Run:
        dice = random.Random(seed)
        model, block_size = dice.choice(list(NUM_GROUPS)), dice.choice([4, 8, 16])
        asked = draw_requests(dice, block_size)
        alone = make_engine(models[model], {"max_model_len": MAX_MODEL_LEN}, {"enable_prefix_caching": False})
        expected = [run_all(alone, [one.prompt], one.params)[0] for one in asked]
        engine = draw_engine(dice, model, models[model], block_size, tmp_path_factory.mktemp("heads"))
        Prompter({number: one.prompt + expected[number].token_ids for number, one in enumerate(asked)}).attend(engine)
        run = Run(asked, expected)
        run.found, run.requests = run_staggered(engine, asked, expected)
        alone.close()
        engine.close()
        return run

    return run_of


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_says_what_it_says_alone(runs: object, seed: int) -> None:
    run: Run = runs(seed)  # type: ignore[operator]
    for number, (one, expected, found) in enumerate(zip(run.asked, run.expected, run.found)):
        if found.finish_reason is FinishReason.CANCELLED:
            assert one.cancel_after and found.token_ids == expected.token_ids[: len(found.token_ids)], number
            continue
        assert found.token_ids == expected.token_ids, number
        assert (found.finish_reason, found.error) == (expected.finish_reason, expected.error), number
        own, theirs = (
            [entry for entry in [*told.logprobs, *(told.prompt_logprobs or [])] if entry is not None]
            for told in (found, expected)
        )
        assert [entry.token_id for entry in own] == [entry.token_id for entry in theirs], number
        assert [entry.logprob for entry in own] == pytest.approx([entry.logprob for entry in theirs], abs=1e-3), number


def test_what_was_drawn_met_each_other(runs: object) -> None:
    """Preemption, cached beginnings, accepted and rejected drafts."""
    found = [request for seed in SEEDS for request in runs(seed).requests]  # type: ignore[operator]
    assert sum(request.num_preemptions for request in found) > 3
    assert sum(request.num_cached_tokens > 0 for request in found) > 3
    assert 20 < sum(request.num_accepted_tokens for request in found) < sum(one.num_drafted_tokens for one in found)
