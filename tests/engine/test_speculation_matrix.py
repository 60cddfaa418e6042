"""Every method x every feature of a request, one cell a test: text, reasons and log-probabilities of plain decoding.

All cells of a method run in one engine at once, so that verifications of every kind are rows of the same steps; prompts
are chunked, requests are preempted and begin in the prefix cache. Heads are random, so a prompter puts most of
their guesses right: acceptance and rejection happen in each cell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from engine_driver import Told, make_engine, run_steps
from prompted_heads import Prompter
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.core.stats import Metric
from slipstream.engine.llm import LLM
from tiny_heads import speculation
from tiny_model import make_tiny_llama

PLAIN = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
CELLS = {
    "greedy": PLAIN,
    "penalties": replace(PLAIN, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "logit_bias": replace(PLAIN, logit_bias=((50, 4.0), (51, 4.0), (52, -100.0))),
    "bad_words": replace(PLAIN, bad_words_ids=((60,), (50, 51))),
    "min_tokens": replace(PLAIN, min_tokens=9, stop_token_ids=tuple(range(60, 220))),
    "stop_token_ids": replace(PLAIN, stop_token_ids=tuple(range(100, 120))),
    "logprobs": replace(PLAIN, logprobs=3),
    "prompt_logprobs": replace(PLAIN, prompt_logprobs=1),
    "guide": replace(PLAIN, guide=Guide("regex", "[a-z ]{22,24}"), ignore_eos=False),
    "json": replace(PLAIN, guide=Guide("json"), ignore_eos=False),
    "sampled": replace(PLAIN, temperature=0.9, seed=11),
    "filtered": replace(PLAIN, temperature=1.2, seed=12, top_k=40, top_p=0.9, min_p=0.01),
    "sampled_logprobs": replace(PLAIN, temperature=0.8, seed=3, repetition_penalty=1.2, logprobs=1),
    "few_drafts": replace(PLAIN, num_draft_tokens=2),
    "no_drafts": replace(PLAIN, num_draft_tokens=0),
    "cancelled": replace(PLAIN, max_tokens=60),
    "allowed_token_ids": replace(PLAIN, allowed_token_ids=tuple(range(40, 80))),
}
NUM_HOGS = 2
METHODS = ("ngram", "draft_model", "medusa", "mtp", "eagle", "eagle3")
# other cells: 3 at least; what drafts does not know which tokens are allowed
FEW_ACCEPTED = {"no_drafts": 0, "json": 0, "guide": 1, "cancelled": 1, "allowed_token_ids": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=3)


def prompt_of(place: int) -> list[int]:
    """All begin alike, so that some begin in the cache."""
    return [*range(30, 54), *((7 * place + 3 * step) % 300 + 100 for step in range(5 + 3 * place))]


@dataclass
class Run:
    told: dict[str, Told]
    requests: dict[str, Request]
    num_preemptions: int


def run(engine: object, references: dict[str, tuple[int, ...]], drafts: bool = True) -> Run:
    """All cells at once; the last is cancelled once it has some tokens."""
    requests = {}
    for hog in range(NUM_HOGS):  # these take the memory that the others need, and leave early
        text = [(11 * hog + 5 * step) % 300 + 100 for step in range(200)]
        engine.submit(Request(text, replace(PLAIN, max_tokens=14, num_draft_tokens=0), handle=-1 - hog))  # type: ignore[attr-defined]
    for place, (cell, params) in enumerate(CELLS.items()):
        params = replace(params, reference_ids=references.get(cell, ()))
        if not drafts:  # a model that drafts nothing refuses to be asked for drafts
            params = replace(params, num_draft_tokens=None)
        requests[cell] = Request(prompt_of(place), params, handle=place)
        engine.submit(requests[cell])  # type: ignore[attr-defined]
    told: dict[Request, Told] = {}
    while requests["cancelled"].num_output_tokens < 12:
        run_steps(engine, told, 1)  # type: ignore[arg-type]
    engine.cancel(requests["cancelled"].handle)  # type: ignore[attr-defined]
    run_steps(engine, told)  # type: ignore[arg-type]
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0  # type: ignore[attr-defined]
    preemptions = sum(request.num_preemptions for request in requests.values())
    return Run({cell: told[request] for cell, request in requests.items()}, requests, preemptions)


@pytest.fixture(scope="module")
def plain(model: Path) -> Run:
    return run(make_engine(model), {}, drafts=False)


@pytest.fixture(scope="module")
def runs(model: Path, plain: Run, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Method -> its run; each is made once, when its first cell asks."""

    @cache
    def run_of(method: str) -> Run:
        engine = make_engine(
            model,
            {"max_model_len": 256},
            {"num_blocks": 84},
            {"max_num_batched_tokens": 64, "overlap_scheduling": "on"},
            speculation(method, model, tmp_path_factory.mktemp(method)),
        )
        texts = {place: prompt_of(place) + plain.told[cell].token_ids for place, cell in enumerate(CELLS)}
        texts |= {-1 - hog: [] for hog in range(NUM_HOGS)}
        Prompter(texts).attend(engine)
        told = {cell: tuple(told.token_ids) for cell, told in plain.told.items()}
        with pytest.MonkeyPatch.context() as patch:  # requests of a grammar that is slow, or late, draft nothing
            patch.setattr("slipstream.engine.grammar_host._SLOW_TOKEN_S", 60.0)
            patch.setattr("slipstream.engine.structured_output.GRACE_S", 60.0)
            return run(engine, told if method == "ngram" else {})

    return run_of


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("method", METHODS)
def test_a_cell_is_as_plain_decoding(runs: object, plain: Run, method: str, cell: str) -> None:
    found: Run = runs(method)  # type: ignore[operator]
    told, expected, request = found.told[cell], plain.told[cell], found.requests[cell]
    assert request.num_accepted_tokens >= FEW_ACCEPTED.get(cell, 3), "drafts that are never taken prove nothing"
    assert (request.num_drafted_tokens > 0) is (cell != "no_drafts")
    if cell == "cancelled":
        assert told.finish_reason is FinishReason.CANCELLED
        count = min(len(told.token_ids), len(expected.token_ids))
        assert count >= 12 and told.token_ids[:count] == expected.token_ids[:count]
        return
    assert told.token_ids == expected.token_ids
    assert (told.finish_reason, told.error) == (expected.finish_reason, expected.error)
    own, theirs = (
        [entry for entry in [*one.logprobs, *(one.prompt_logprobs or [])] if entry is not None]
        for one in (told, expected)
    )
    assert [(entry.token_id, entry.rank) for entry in own] == [(entry.token_id, entry.rank) for entry in theirs]
    assert [entry.logprob for entry in own] == pytest.approx([entry.logprob for entry in theirs], abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_the_cells_met_each_other(runs: object, method: str) -> None:
    """Chunks, preemption, cached beginnings and rejected drafts all happened."""
    found: Run = runs(method)  # type: ignore[operator]
    assert found.num_preemptions > 0
    assert sum(request.num_cached_tokens > 0 for request in found.requests.values()) > 3
    drafted, accepted = (
        sum(getattr(request, name) for request in found.requests.values())
        for name in ("num_drafted_tokens", "num_accepted_tokens")
    )
    assert 0 < accepted <= drafted
    assert method == "draft_model" or accepted < drafted


def test_a_stop_string_cuts_what_was_accepted_in_one_step(model: Path) -> None:
    """The string ends amid accepted drafts, or is spread over two of them: the text ends before it."""
    prompt, settings = prompt_of(9), {"block_size": 8, "num_blocks": 128, "device": "cpu"}
    with LLM(str(model), **settings) as plain:
        (whole,) = plain.generate([prompt], PLAIN)
        stops = [whole.text[place : place + 3] for place in (5, 9, 14)]
        expected = [plain.generate([prompt], replace(PLAIN, stop=(stop,)))[0] for stop in stops]
    with LLM(str(model), speculative_method="ngram", speculation_throttle="off", **settings) as drafting:
        for stop, wanted in zip(stops, expected):
            params = replace(PLAIN, stop=(stop,), reference_ids=tuple(whole.token_ids), num_draft_tokens=15)
            (found,) = drafting.generate([prompt], params)
            assert (found.text, found.finish_reason, found.stop_reason) == (wanted.text, "stop", stop)
            assert found.token_ids == whole.token_ids[: len(found.token_ids)]
            assert len(found.token_ids) >= len(wanted.token_ids)
        assert drafting.engine.scheduler.cache.num_used_blocks == 0
        stats = drafting.engine.stats
        news = stats.drain()
        stats.publish()
        accepted = sum(values[0] for metric, values in [*news, *stats.drain()] if metric == Metric.ACCEPTED_TOKENS)
    assert accepted > 12, "drafts that are never taken prove nothing"
