"""Beam search: the sequences of Hugging Face's, whatever the blocks, chunks and neighbours; limits, ends, refusals."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import make_engine
from slipstream import LLM, SamplingParams
from slipstream.core import prefix
from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from slipstream.core.errors import RequestError
from slipstream.core.outputs import StepOutput, TokenLogprobs
from slipstream.core.prefix import hash_block
from slipstream.core.request import FinishReason, Request
from slipstream.core.stats import Metric
from slipstream.engine import beam_search
from slipstream.engine.engine import Engine
from slipstream.engine.llm import Completion
from slipstream.engine.output_processor import OutputProcessor
from slipstream.protocol.request_parser import ClientRequest
from slipstream.protocol.responses import ENCODERS
from slipstream.worker.interface import StepInput
from speculation_config import speculation_config
from transformers import AutoModelForCausalLM, PreTrainedModel

COUNTED = (Metric.FINISHED_LENGTH, Metric.PROMPT_TOKENS)
BEAMS = SamplingParams(max_tokens=12, beam_width=4, n=4)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_llama).eval()


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    """Blocks of 8 tokens and steps of 16: prefixes are found in the cache, and prompts are chunked."""
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_llama), device="cpu"),
        cache=CacheConfig(block_size=8, num_blocks=128),
        scheduler=SchedulerConfig(max_num_batched_tokens=16),
    )
    with LLM.from_config(config) as llm:
        yield llm


def frequent_tokens(reference: PreTrainedModel, prompts: list[list[int]]) -> list[int]:
    """Tokens that beams without an end reach, so that as stop tokens they end some of them, early and late."""
    with torch.no_grad():
        found = [reference.generate(torch.tensor([prompt]), max_new_tokens=8, num_beams=4, eos_token_id=None)[0]
                 for prompt in prompts]  # fmt: skip
    return sorted({int(tokens[-3]) for tokens in found} | {int(tokens[-6]) for tokens in found})[:4]


def expected_of(
    reference: PreTrainedModel, prompt: list[int], params: SamplingParams, ends: list[int]
) -> tuple[list[list[int]], list[float]]:
    with torch.no_grad():
        found = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=params.max_tokens,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=ends or None,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        length = next((place + 1 for place, token_id in enumerate(row) if token_id in ends), len(row))
        sequences.append(row[:length])
    return sequences, found.sequences_scores.tolist()


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("width", [2, 5])
def test_sequences_are_those_of_hugging_face(
    llm: LLM,
    reference: PreTrainedModel,
    prompts: list[list[int]],
    width: int,
    early_stopping: bool,
    length_penalty: float,
) -> None:
    chosen = prompts[2:9:2]
    ends = frequent_tokens(reference, chosen)
    params = replace(
        BEAMS, beam_width=width, n=width, length_penalty=length_penalty, early_stopping=early_stopping,
        stop_token_ids=tuple(ends), ignore_eos=True, logprobs=0,
    )  # fmt: skip
    found = llm.generate(chosen, params)
    reasons = set()
    for index, prompt in enumerate(chosen):
        own = [completion for completion in found if completion.prompt_index == index]
        sequences, scores = expected_of(reference, prompt, params, ends)
        assert [completion.token_ids for completion in own] == sequences
        assert [score_of(completion, length_penalty) for completion in own] == pytest.approx(scores, abs=1e-4)
        reasons |= {completion.finish_reason for completion in own}
    assert "stop" in reasons or length_penalty > 1.0  # which prefers long texts


def score_of(completion: Completion, length_penalty: float) -> float:
    assert completion.cumulative_logprob is not None
    return completion.cumulative_logprob / len(completion.token_ids) ** length_penalty


def test_the_best_n_are_returned_with_their_log_probabilities(llm: LLM, prompts: list[list[int]]) -> None:
    every = llm.generate([prompts[4]], replace(BEAMS, logprobs=2))
    best = llm.generate([prompts[4]], replace(BEAMS, n=2))
    assert [one.token_ids for one in best] == [one.token_ids for one in every[:2]]
    assert best[0].logprobs is None and best[0].cumulative_logprob == pytest.approx(every[0].cumulative_logprob)
    for completion in every:
        entries = completion.logprobs or []
        assert [entry.token_id for entry in entries] == completion.token_ids
        assert all(len(entry.top) == 2 and entry.rank >= 1 for entry in entries)
        assert completion.text == llm.engine.tokenizer.decode(completion.token_ids)


def test_sequences_that_begin_alike_each_show_every_alternative(engine: Engine) -> None:
    """They share the entries of the tokens that they begin with, which the first of them writes as JSON."""
    params = SamplingParams(max_tokens=6, beam_width=2, n=2, logprobs=2)
    (step,) = engine.submit(Request([5, 6, 7, 8], params, handle=3))
    client = ClientRequest(3, step.search.request, outputs=("logprobs",))
    processor = OutputProcessor(engine.tokenizer, lambda request, stop: None, lambda handle: None)
    processor.add(client)
    ends = run(engine)
    expected = [[sorted({str(entry.token_id), *(str(one) for one, _ in entry.top)}) for entry in end.logprobs or ()]
                for end in ends]  # fmt: skip
    assert expected[0][0] == expected[1][0] and ends[0].logprobs[0] is ends[1].logprobs[0]  # type: ignore[index]
    shown = [json.loads(ENCODERS["logprobs"](client, output)[1][4:]) for output in processor.process(ends)]
    assert [[sorted(entry) for entry in entries] for entries in shown] == expected


def test_a_search_is_the_same_beside_others_and_with_few_blocks(tiny_llama: Path, prompts: list[list[int]]) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_llama), device="cpu", max_model_len=64),
        cache=CacheConfig(block_size=8, num_blocks=8),
    )
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM.from_config(config) as llm:
        alone = [llm.generate([prompt], BEAMS) for prompt in prompts[5:8]]
        plain = llm.generate([prompts[3]], greedy)[0].token_ids
        together = llm.generate([*prompts[5:8], prompts[3]], [BEAMS, BEAMS, BEAMS, greedy])
        assert [one.token_ids for one in together[:-1]] == [one.token_ids for search in alone for one in search]
        assert together[-1].token_ids == plain


def run(engine: Engine, until: int = 400) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    for _ in range(until):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError("the search did not end")


def test_a_search_counts_as_its_sequences_and_leaves_nothing_behind(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(tiny_llama)
    num_free = engine.scheduler.cache.num_free_blocks
    engine.submit(Request(prompts[4], BEAMS, handle=3))
    seen: Counter[int] = Counter()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        for metric, values in engine.stats.drain():
            seen[metric] += int(sum(values)) if metric in COUNTED else len(values)
    assert [output.request.sequence_index for output in outputs] == [0, 1, 2, 3]
    assert {output.request.handle for output in outputs} == {3}
    assert (seen[Metric.FINISHED_LENGTH], seen[Metric.PROMPT_TOKENS]) == (4, len(prompts[4]))
    assert (seen[Metric.E2E_TIME], seen[Metric.QUEUE_TIME], seen[Metric.TTFT], seen[Metric.ITL]) == (4, 1, 1, 0)
    assert engine.scheduler.cache.num_free_blocks == num_free
    assert all(output.request.times.last_token_ns >= output.request.times.arrival_ns > 0 for output in outputs)


def test_a_search_of_a_known_prompt_says_what_was_cached(engine: Engine) -> None:
    """Cached tokens are those of the prompt, before the first token: later steps find nearly all of theirs."""
    prompt = [(11 * place) % 400 + 3 for place in range(50)]
    for num_cached in (0, 48):
        engine.submit(Request(list(prompt), BEAMS))
        assert [output.request.num_cached_tokens for output in run(engine)] == [num_cached] * 4


def test_a_step_does_not_hash_the_prompt_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the tokens that its beam has: a step of ten beams behind a long prompt would hold up all others."""
    hashed: list[Sequence[int]] = []

    def note(parent: bytes, token_ids: Sequence[int]) -> bytes:
        hashed.append(token_ids)
        return hash_block(parent, token_ids)

    monkeypatch.setattr(prefix, "hash_block", note)
    engine.submit(Request([(13 * place) % 400 + 3 for place in range(400)], BEAMS))
    assert len(run(engine)) == 4 and 400 // 8 <= len(hashed) <= 400 // 8 + 2 * BEAMS.beam_width


def test_a_search_looks_no_further_than_it_needs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever alternatives the client wants to see: with the whole vocabulary ten beams took seconds a token."""
    counts: Counter[int] = Counter()
    found: dict[int, list[StepOutput]] = {}
    for asked in (0, engine.spec.vocab_size):

        def count(*values: Any, asked: int = asked) -> TokenLogprobs:
            counts[asked] += 1
            return TokenLogprobs(*values)

        monkeypatch.setattr(beam_search, "TokenLogprobs", count)
        engine.submit(Request([7, 9, 11, 13], replace(BEAMS, logprobs=asked)))
        found[asked] = run(engine)
    few, every = found.values()
    assert len(set(counts.values())) == 1, counts
    assert [output.new_token_ids for output in few] == [output.new_token_ids for output in every]
    for seen, entry in (
        (a, b) for one, other in zip(few, every) for a, b in zip(one.logprobs or [], other.logprobs or [])
    ):
        assert (seen.rank, seen.top, len(entry.top)) == (entry.rank, [], engine.spec.vocab_size)
        assert entry.top[entry.rank - 1] == (entry.token_id, entry.logprob)


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_a_cancelled_search_ends_all_its_sequences_at_once(
    engine: Engine, prompts: list[list[int]], num_steps: int
) -> None:
    engine.submit(Request(prompts[4], replace(BEAMS, max_tokens=100), handle=9))
    outputs = [output for _ in range(num_steps) for output in engine.step()]
    assert outputs == []
    engine.cancel(9)
    outputs = run(engine)
    assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED] * 4
    assert [output.request.sequence_index for output in outputs] == [0, 1, 2, 3]
    assert not engine.scheduler.has_work


def test_a_search_past_its_deadline_answers_what_it_has(engine: Engine, prompts: list[list[int]]) -> None:
    engine.submit(Request(prompts[4], replace(BEAMS, max_tokens=100), deadline=time.monotonic() + 3600, handle=9))
    for _ in range(5):
        assert not engine.step()
    for request in list(engine.scheduler.live_requests):
        request.deadline = 0.0
        engine.scheduler.expiries.add(request)
    outputs = run(engine)
    assert [output.finish_reason for output in outputs] == [FinishReason.TIMEOUT] * 4
    assert all(output.new_token_ids for output in outputs)


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"n": 5}, "n"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"stop": ("a",)}, "stop"),
        ({"bad_words_ids": ((4,),)}, "bad_words_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_beams_cannot_follow_is_refused_by_name(changes: dict, field: str) -> None:
    with pytest.raises(RequestError, match="accepted") as error:
        replace(BEAMS, **changes)
    assert error.value.field == field


def test_more_beams_than_the_model_or_its_cache_allow_are_refused(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    with pytest.raises(RequestError, match="at most max_beam_width=10"):
        engine.submit(Request([5, 6], replace(BEAMS, beam_width=11)))
    without = EngineConfig(
        model=ModelConfig(model=str(tiny_llama), device="cpu"),
        cache=CacheConfig(block_size=8, num_blocks=64, enable_prefix_caching=False),
    )
    with LLM.from_config(without) as llm, pytest.raises(RequestError, match="enable_prefix_caching is off"):
        llm.generate([[5, 6]], BEAMS)


@pytest.mark.parametrize("fails_at", [4, 6, 8])
def test_a_search_does_not_end_with_a_step_s_token(fails_at: int, tiny_llama: Path) -> None:
    """When the engine dies between the read of a step and the search that it belongs to."""
    drafts = speculation_config("ngram", throttle="off")
    engine = make_engine(tiny_llama, None, None, {"overlap_scheduling": "on"}, drafts)
    execute, calls = engine.worker.execute, iter(range(1, 100))

    def fail(step: StepInput) -> None:
        if next(calls) == fails_at:
            raise RuntimeError("no device")
        execute(step)

    engine.worker.execute = fail  # type: ignore[method-assign]
    engine.submit(Request([5, 6, 7] * 3, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), handle=1))
    engine.submit(Request([9, 10, 11, 12], SamplingParams(max_tokens=8, beam_width=2), handle=2))
    ends: list[StepOutput] = []
    while engine.has_work:
        ends += [output for output in engine.step() if output.finish_reason is not None]
    assert engine.error is not None and {output.request.handle for output in ends} == {1, 2}
    assert {output.finish_reason for output in ends} == {FinishReason.ERROR}
    assert not any(output.new_token_ids for output in ends)
