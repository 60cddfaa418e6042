"""Whatever is drafted, the text is that of plain decoding: every feature of a request, chains and trees.

The drafts come from an oracle that mixes the right tokens with wrong ones, so that acceptance, rejection and moved
branches all happen in every cell.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_oracle import Oracle, consult
from engine_driver import Told, make_engine, run_all, run_steps
from slipstream.core.config import SpeculationConfig
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.core.speculation import DraftPlanner, Speculation
from slipstream.core.step import ScheduledStep
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.ngram import NgramProposer
from tiny_heads import speculation

GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
DRAFTING = SpeculationConfig(methods="ngram", throttle="off")

CELLS: dict[str, dict[str, object]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logit_bias": {"logit_bias": ((50, 4.0), (51, 4.0), (52, -100.0))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(40, 80))},
    "bad_words": {"bad_words_ids": ((60,), (50, 51), (51, 50, 52))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(60, 220))},
    "stop_token_ids": {"stop_token_ids": tuple(range(100, 140))},
    "stop_words_ids": {"stop_words_ids": tuple((a,) for a in range(100, 120))},
    "one_token": {"max_tokens": 1},
    "three_tokens": {"max_tokens": 3},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "guide": {"guide": Guide("regex", "[a-z ]{6,18}"), "ignore_eos": False},
    "json": {"guide": Guide("json"), "ignore_eos": False},
    "sampled": {"temperature": 0.9, "seed": 11},
    "filtered": {"temperature": 1.2, "seed": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "sampled_all": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "min_tokens": 5, "logprobs": 1},
    "siblings": {"temperature": 0.8, "seed": 3, "n": 3},
}


def outputs_of(engine: object, prompts: list[list[int]], params: SamplingParams) -> dict[tuple[int, int], Told]:
    """By handle and sequence, everything that was told."""
    for handle, prompt in enumerate(prompts):
        engine.submit(Request(list(prompt), params, handle=handle))  # type: ignore[attr-defined]
    told: dict[Request, Told] = {}
    run_steps(engine, told)  # type: ignore[arg-type]
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0  # type: ignore[attr-defined]
    return {(request.handle, request.sequence_index): news for request, news in told.items()}


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> object:
    return make_engine(tiny_llama)


@pytest.fixture(scope="module")
def drafting(tiny_llama: Path) -> object:
    return make_engine(tiny_llama, speculation=DRAFTING)


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("cell", CELLS)
def test_text_is_that_of_plain_decoding(
    plain: object, drafting: object, prompts: list[list[int]], cell: str, is_tree: bool
) -> None:
    params = SamplingParams(**{**GREEDY, **CELLS[cell]})
    expected = outputs_of(plain, prompts, params)
    oracle = Oracle({key: told.token_ids for key, told in expected.items()}, is_tree)
    consult(drafting, oracle)
    found = outputs_of(drafting, prompts, params)
    assert found.keys() == expected.keys()
    for key, told in found.items():
        assert told.token_ids == expected[key].token_ids
        assert (told.finish_reason, told.error) == (expected[key].finish_reason, expected[key].error)
        assert _entries(told)[0] == _entries(expected[key])[0]
        assert _entries(told)[1] == pytest.approx(_entries(expected[key])[1], abs=1e-3)
    assert oracle.num_accepted >= len(prompts) or cell in ("one_token", "three_tokens")


def _entries(told: Told) -> tuple[list[tuple[int, int]], list[float]]:
    """Tokens with their ranks, and the log-probabilities, of output and prompt."""
    entries = [entry for entry in [*told.logprobs, *(told.prompt_logprobs or [])] if entry is not None]
    return [(entry.token_id, entry.rank) for entry in entries], [entry.logprob for entry in entries]


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": {"max_num_batched_tokens": 11}},
        {"cache": {"num_blocks": 20}, "model": {"max_model_len": 128}},
        {"cache": {"enable_prefix_caching": False}},
        {"cache": {"block_size": 1, "num_blocks": 4096}},
        {"scheduler": {"policy": "guaranteed_no_evict"}, "cache": {"num_blocks": 20}, "model": {"max_model_len": 128}},
        {"cache": {"dtype": "int8"}},
        {"cache": {"dtype": "int4"}},
        {"cache": {"dtype": "fp8_e4m3"}},
        {"scheduler": {"overlap_scheduling": "on"}},
    ],
    ids=["chunked", "preempted", "no_prefix_cache", "blocks_of_1", "no_evict", "int8", "int4", "fp8", "overlapped"],
)
def test_engines_of_every_kind_verify_alike(
    tiny_llama: Path, prompts: list[list[int]], settings: dict[str, dict[str, object]]
) -> None:
    params = SamplingParams(**GREEDY)
    expected = outputs_of(make_engine(tiny_llama, **settings), prompts, params)
    engine = make_engine(tiny_llama, **settings, speculation=DRAFTING)
    for is_tree in (False, True):
        texts = {key: told.token_ids for key, told in expected.items()}
        oracle = Oracle(texts, is_tree)
        consult(engine, oracle)
        for _ in range(2):  # the second time from a cache that verified steps have filled
            assert {key: told.token_ids for key, told in outputs_of(engine, prompts, params).items()} == texts
        assert oracle.num_accepted > 3 * len(prompts)


def test_cancelled_while_it_drafts(drafting: object, prompts: list[list[int]]) -> None:
    engine = drafting
    consult(engine, Oracle({(0, 0): [7] * 30}, is_tree=True))
    request = Request(list(prompts[5]), SamplingParams(**GREEDY))
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.cancel(0)
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert told[request].finish_reason is FinishReason.CANCELLED
    assert engine.scheduler.cache.num_used_blocks == 0


def test_a_request_turns_drafts_off(drafting: object, prompts: list[list[int]]) -> None:
    oracle = Oracle({}, is_tree=False)
    consult(drafting, oracle)
    run_all(drafting, prompts[:2], SamplingParams(**GREEDY, num_draft_tokens=0))
    run_all(drafting, prompts[:2], SamplingParams(**GREEDY, speculative_method="none"))
    assert oracle.num_calls == 0


def test_ngram_repeats_what_was_said(tiny_llama: Path, prompts: list[list[int]]) -> None:
    """A reference that holds the answer is followed from its second token on."""
    params = SamplingParams(**GREEDY)
    (expected,) = run_all(make_engine(tiny_llama), prompts[8:9], params)
    engine = make_engine(tiny_llama, speculation=DRAFTING)
    request = Request(list(prompts[8]), SamplingParams(**GREEDY, reference_ids=tuple(expected.token_ids)))
    engine.submit(request)
    run_steps(engine, {})
    assert request.output_token_ids == expected.token_ids
    assert request.num_accepted_tokens >= 16
    assert request.num_drafted_tokens >= request.num_accepted_tokens


def test_drafts_take_no_blocks_that_others_were_promised(
    tiny_llama: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Heads want slots past a request's end for their drafts; without preemption they get its own blocks at most."""
    engine = make_engine(
        tiny_llama,
        {"max_model_len": 128},
        {"num_blocks": 20},
        {"policy": "guaranteed_no_evict", "overlap_scheduling": "on"},
        speculation("mtp", tiny_llama, tmp_path),
    )
    requests = [Request(list(prompt), SamplingParams(**GREEDY), handle=at) for at, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.live_requests:
            assert len(request.block_ids) <= engine.scheduler.cache.num_blocks_for(request.stop_conditions.max_slots)
    assert engine.error is None and sum(request.num_drafted_tokens for request in requests) > 0


def test_the_planner_hears_of_requests_without_drafts(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two finds an n-gram in each step: half of the wanted drafts, and the other's step brings one token."""
    first: list[int] = []

    def find_for_one(proposer: NgramProposer, request: RequestState, num_drafts: int) -> list[int]:
        first[:] = first or [request.sequence_id]
        return [1] * num_drafts if request.sequence_id in first else []

    monkeypatch.setattr(NgramProposer, "_continue", find_for_one)
    engine = make_engine(tiny_llama, speculation=DRAFTING)
    planner = engine.scheduler.planner
    heard: list[tuple[str, int, int]] = []
    monkeypatch.setattr(planner, "note_found", lambda *told: heard.append(told))
    for _ in range(2):
        engine.submit(Request([5, 6, 7, 5, 6], SamplingParams(**GREEDY)))  # type: ignore[arg-type]
    run_steps(engine, {})
    both = [found / wanted for method, wanted, found in heard if method == "ngram" and wanted == 10]
    assert len(both) > 5 and set(both) == {0.5}
    assert planner._gains["ngram"].expected_tokens(1)[1] < 1.4, "of the others, too, none was accepted"


class Recurring(DraftPlanner):
    """Makes drafts in every second dozen of steps."""

    def num_drafts_of(self, wanted: Speculation) -> int:
        return 0 if self._num_steps // 12 % 2 else wanted.num_draft_tokens


@pytest.mark.parametrize("method", ["ngram", "medusa", "mtp"])
def test_runs_of_decodes_between_drafts_change_no_text(
    method: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    prompts = [[5, 6, 7, 5, 6], [9, 8, 9, 8], [40, 41, 42, 43, 40]]
    expected = run_all(make_engine(tiny_llama), prompts, params)
    config = DRAFTING if method == "ngram" else speculation(method, tiny_llama, tmp_path)
    engine = make_engine(tiny_llama, scheduler={"overlap_scheduling": "on"}, speculation=config)
    engine.scheduler.planner = Recurring()
    steps: list[ScheduledStep] = []
    schedule = engine.scheduler.schedule

    def noted(admits: bool = True) -> ScheduledStep:
        steps.append(schedule(admits))
        return steps[-1]

    monkeypatch.setattr(engine.scheduler, "schedule", noted)
    told = run_all(engine, prompts, params)
    assert [one.token_ids for one in told] == [one.token_ids for one in expected]
    assert sum(step.run is not None for step in steps) > 10 and any(sum(step.num_drafts) for step in steps)
    has_chains = method != "medusa"
    assert has_chains == any(step.verified is not None and sum(step.num_drafts) for step in steps), "of verifications"
