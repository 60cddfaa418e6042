"""Overlapped scheduling is plain scheduling, token for token, whatever is asked, preempted, cancelled or stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, Told, make_engine, model_worker, run_all, run_steps
from slipstream.core.errors import ConfigError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine

Texts = list[list[int]]
OVERLAPPED = {"overlap_scheduling": "on"}
SAMPLED = replace(GREEDY, temperature=0.9, top_k=40, top_p=0.95)
# one of each kind, so that requests that run ahead share steps with requests that may not
MIXTURE = [
    GREEDY,
    replace(SAMPLED, seed=1),
    replace(SAMPLED, seed=2, repetition_penalty=1.3, frequency_penalty=0.5),
    replace(GREEDY, logprobs=2, prompt_logprobs=1),
    replace(GREEDY, guide=Guide("regex", "[a-z]{10}"), ignore_eos=False),
    replace(GREEDY, bad_words_ids=((4, 5), (7,)), logit_bias=((9, 3.0),)),
    replace(SAMPLED, seed=3, min_tokens=9, stop_token_ids=tuple(range(0, 400, 7))),
    replace(SAMPLED, seed=4, stop_token_ids=tuple(range(0, 400, 9)), logprobs=0),
    replace(SAMPLED, seed=5, stop_words_ids=((11,), (12, 13))),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=2, prompt_logprobs=0),
    replace(SAMPLED, seed=6, presence_penalty=0.4, min_p=0.05),
]


@pytest.fixture(scope="module")
def expected(engine: Engine, prompts: Texts) -> list[Told]:
    assert engine._num_ahead == 0
    return run_all(engine, prompts, MIXTURE)


@pytest.mark.parametrize(
    ("cache", "scheduler"),
    [
        ({}, {}),
        ({}, {"max_num_batched_tokens": 16}),
        ({"enable_prefix_caching": False}, {"max_num_seqs": 5}),
        ({"num_blocks": 20}, {"max_num_batched_tokens": 40}),  # preempts
        ({"num_blocks": 20}, {"policy": "guaranteed_no_evict"}),
    ],
)
def test_overlapped_is_plain(
    tiny_llama: Path, prompts: Texts, expected: list[Told], cache: dict[str, object], scheduler: dict[str, object]
) -> None:
    model = {"max_model_len": 128} if "num_blocks" in cache else {}
    engine = make_engine(tiny_llama, model=model, cache=cache, scheduler={**OVERLAPPED, **scheduler})
    for told, wanted in zip(run_all(engine, prompts, MIXTURE), expected):
        assert (told.token_ids, told.finish_reason, told.error) == (wanted.token_ids, wanted.finish_reason, "")
        assert [entry.token_id for entry in told.logprobs] == [entry.token_id for entry in wanted.logprobs]
        assert [entry.logprob for entry in told.logprobs] == pytest.approx(
            [e.logprob for e in wanted.logprobs], abs=1e-4
        )
        assert (told.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
        assert len(told.prompt_logprobs or []) == len(wanted.prompt_logprobs or [])
    assert not engine.has_work and not engine._in_flight


def test_preempted_in_flight(tiny_llama: Path, prompts: Texts, engine: Engine) -> None:
    """A token under way of a request that loses its blocks is kept."""
    wanted = [told.token_ids for told in run_all(engine, prompts, GREEDY)]
    tight = make_engine(tiny_llama, {"max_model_len": 128}, {"num_blocks": 20}, OVERLAPPED)
    requests = [tight.submit(Request(list(prompt), GREEDY))[0] for prompt in prompts]
    run_steps(tight, {})
    assert [request.output_token_ids for request in requests] == wanted
    assert sum(request.num_preemptions for request in requests) > 0
    assert tight.scheduler.cache.num_used_blocks == 0


def test_a_step_is_launched_before_the_last_is_read(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, scheduler=OVERLAPPED)
    (request,) = engine.submit(Request([5, 6, 7], replace(GREEDY, max_tokens=4)))
    assert not engine.step() and request.num_output_placeholders == 1
    for num_known in (1, 2, 3):
        (output,) = engine.step()
        assert len(output.new_token_ids) == 1 and request.num_output_tokens == num_known
    (output,) = engine.step()  # nothing to launch: the last token ends the request by its length
    assert output.finish_reason is FinishReason.LENGTH and not engine.has_work
    assert request.num_computed_tokens == 3 + 4 - 1, "computed beyond its end"


def test_what_needs_its_last_token_waits_alone(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, scheduler=OVERLAPPED)
    (waiting,) = engine.submit(Request([5, 6, 7], replace(GREEDY, bad_words_ids=((4, 5),))))
    (ahead,) = engine.submit(Request([8, 9], GREEDY))
    run_steps(engine, {}, 9)
    assert ahead.num_output_tokens == 8 and waiting.num_output_tokens in (4, 5)


@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_ended_in_flight(tiny_llama: Path, engine: Engine, end: str) -> None:
    """Blocks are free at once, the token under way is dropped, who takes the blocks next is not disturbed."""
    other_prompt = [(7 * i) % 400 + 3 for i in range(40)]
    wanted = run_all(engine, [other_prompt], GREEDY)[0].token_ids
    tight = make_engine(tiny_llama, {"max_model_len": 64}, {"num_blocks": 8}, OVERLAPPED)
    told: dict[Request, Told] = {}
    (first,) = tight.submit(Request([5] * 33, replace(GREEDY, max_tokens=30), handle=1))
    (other,) = tight.submit(Request(other_prompt, GREEDY, handle=2))
    run_steps(tight, told, 6)
    assert first.num_output_placeholders == 1 and not other.block_ids
    num_known = len(told[first].token_ids)
    if end == "cancel":
        tight.cancel(1)
    else:
        tight.finish(first, "word")
    run_steps(tight, told)
    assert told[first].finish_reason is (FinishReason.CANCELLED if end == "cancel" else FinishReason.STOP)
    assert len(told[first].token_ids) == num_known and told[other].token_ids == wanted
    assert tight.scheduler.cache.num_used_blocks == 0 and not tight._in_flight


def test_dead_engine_answers_what_is_in_flight(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_llama, scheduler=OVERLAPPED)
    told: dict[Request, Told] = {}
    requests = [engine.submit(Request([5, 6, handle + 7], GREEDY))[0] for handle in range(3)]
    run_steps(engine, told, 2)

    def explode(inputs: object) -> None:
        raise ValueError("kernel went wrong")

    monkeypatch.setattr(model_worker(engine).runner, "forward", explode)
    run_steps(engine, told, 1)
    assert all(told[request].finish_reason is FinishReason.ERROR for request in requests)
    assert not engine.step() and not engine.has_work


def test_unknown_mode_is_refused() -> None:
    from slipstream.core.config_parse import config_from_values

    with pytest.raises(ConfigError, match=r"overlap_scheduling.*auto, on, off"):
        config_from_values({"model": "/m", "overlap_scheduling": "maybe"})


def test_default_on_a_cpu_is_plain(engine: Engine) -> None:
    assert engine.config.scheduler.overlap_scheduling == "auto" and engine._num_ahead == 0
    assert SamplingParams().needs_last_token is False
