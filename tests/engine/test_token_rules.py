"""Rules of one request that leave no token: it ends with an error that names them, and nothing that it forbids is said.
Others of the batch say what they say alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, run_all
from slipstream.core.errors import RequestError
from slipstream.core.finish import StopConditions
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.core.settings import MAX_BIAS
from slipstream.engine.engine import Engine
from slipstream.engine.step_inputs import new_request
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.sampler import Sampler
from speculation_config import speculation_config

PROMPT = [70, 201, 33]
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
KINDS = [GREEDY, SAMPLED, replace(SAMPLED, top_p=1.0)]


@pytest.fixture(scope="module", params=["overlapped", "n-gram drafts"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    drafts = speculation_config("ngram", ngram_min=1, throttle="off") if request.param == "n-gram drafts" else None
    engine = make_engine(tiny_llama, scheduler={"overlap_scheduling": "on"}, speculation=drafts)
    yield engine
    engine.close()


def _told(engine: Engine, params: SamplingParams) -> Told:
    """What a request is told, between two others, which are told what they are told alone."""
    others = [replace(GREEDY, ignore_eos=True), replace(SAMPLED, seed=8)]
    first, told, last = run_all(engine, [PROMPT, PROMPT, PROMPT], [others[0], params, others[1]])
    alone = [run_all(engine, [PROMPT], one)[0].token_ids for one in others]
    assert [first.token_ids, last.token_ids] == alone and engine.error is None
    return told


def _ids(engine: Engine, texts: str) -> tuple[int, ...]:
    """The tokens that are one of these characters."""
    decode = engine.tokenizer.decode
    return tuple(one for one in range(engine.spec.vocab_size) if decode([one], True) in set(texts))


@pytest.mark.parametrize("params", KINDS, ids=["greedy", "top-p", "sampled"])
def test_a_grammar_that_admits_none_of_the_allowed_tokens(engine: Engine, params: SamplingParams) -> None:
    digits = _ids(engine, "0123456789")
    assert digits
    guide = Guide("regex", "[0-9]{2}[a-z]{3}")
    told = _told(engine, replace(params, guide=guide, allowed_token_ids=digits, ignore_eos=False))
    assert (told.finish_reason, told.fault) == (FinishReason.ERROR, RequestError)
    assert set(told.token_ids) <= set(digits) and len(told.token_ids) == 2
    assert told.error.startswith(
        "allowed_token_ids: no token is left after 2 tokens by allowed_token_ids and the gramm"
    )
    assert "accepted: " in told.error


@pytest.mark.parametrize("params", KINDS, ids=["greedy", "top-p", "sampled"])
def test_a_complete_text_ends_although_the_end_token_is_not_listed(engine: Engine, params: SamplingParams) -> None:
    digits = _ids(engine, "0123456789")
    guide = Guide("regex", "[0-9]{2}([a-z]{3})?")
    told = _told(engine, replace(params, guide=guide, allowed_token_ids=digits, ignore_eos=False, min_tokens=4))
    assert (told.finish_reason, told.error) == (FinishReason.STOP, "")
    assert len(told.token_ids) == 3 and set(told.token_ids[:2]) <= set(digits)


@pytest.mark.parametrize("params", KINDS, ids=["greedy", "top-p", "sampled"])
def test_bad_words_that_forbid_all_allowed_tokens(engine: Engine, params: SamplingParams) -> None:
    told = _told(engine, replace(params, allowed_token_ids=(5, 6), bad_words_ids=((6,), (5, 5, 5), (9, 5))))
    assert (told.finish_reason, told.fault, told.token_ids) == (FinishReason.ERROR, RequestError, [5, 5])
    assert told.error.startswith("bad_words: no token is left after 2 tokens by allowed_token_ids and bad words, ")


def test_the_last_token_that_a_request_may_have_breaks_no_rule_either(engine: Engine) -> None:
    params = replace(GREEDY, max_tokens=3, allowed_token_ids=(5,), bad_words_ids=((5, 5, 5),), logprobs=1)
    told = _told(engine, params)
    assert (told.finish_reason, told.token_ids, len(told.logprobs)) == (FinishReason.ERROR, [5, 5], 2)
    assert "bad_words: " in told.error
    told = _told(engine, replace(params, max_tokens=2))
    assert (told.finish_reason, told.token_ids) == (FinishReason.LENGTH, [5, 5])


def test_bad_words_that_forbid_all_that_a_grammar_admits(engine: Engine) -> None:
    guide = Guide("json_schema", json.dumps({"enum": ["yes", "no"]}))
    letters = [(one,) for one in range(engine.spec.vocab_size) if '"' in engine.tokenizer.decode([one], True)]
    told = _told(engine, replace(GREEDY, guide=guide, bad_words_ids=tuple(letters), ignore_eos=False))
    assert (told.finish_reason, told.fault, told.token_ids) == (FinishReason.ERROR, RequestError, [])
    assert told.error.startswith("bad_words: no token is left after 0 tokens by bad words and the grammar, ")


def test_bad_words_that_are_the_vocabulary(engine: Engine) -> None:
    words = tuple((one,) for one in range(engine.spec.vocab_size))
    told = _told(engine, replace(GREEDY, bad_words_ids=words))
    assert told.error.startswith("bad_words: no token is left after 0 tokens by bad words, ") and not told.token_ids


def test_allowed_tokens_that_are_all_bad_words_are_refused_at_once(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"^allowed_token_ids: all of them are bad words, accepted: at least one"):
        engine.submit(Request(PROMPT, replace(GREEDY, allowed_token_ids=(5, 6), bad_words_ids=((5,), (6,), (7, 7)))))


def test_biases_leave_every_token_however_many_have_the_least(engine: Engine) -> None:
    vocabulary = range(engine.spec.vocab_size)
    told = _told(engine, replace(GREEDY, logit_bias=tuple((one, -MAX_BIAS) for one in vocabulary)))
    assert told.token_ids == _told(engine, GREEDY).token_ids


def test_rules_are_forgotten_with_their_requests(engine: Engine) -> None:
    run_all(engine, [PROMPT], replace(GREEDY, allowed_token_ids=(5, 6), bad_words_ids=((6, 6),)))
    run_all(engine, [PROMPT], replace(GREEDY, allowed_token_ids=(5,), bad_words_ids=((5, 5),)))
    assert not engine._rules._rules


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_rows_without_a_token_stay_numbers(temperature: float) -> None:
    """The most that a row can be masked: not allowed, a bad word, an end token too early."""
    params = SamplingParams(
        temperature=temperature, min_tokens=2, max_tokens=5, stop_token_ids=(3,), allowed_token_ids=(3, 4),
        bad_words_ids=tuple((one,) for one in range(8)), seed=1, top_p=0.5, min_p=0.1,
    )  # fmt: skip
    plain = SamplingParams(temperature=temperature, seed=2)
    states = []
    for one in (params, plain):
        request = Request([1, 2], one, seed=7)
        request.stop_conditions = StopConditions(request, 100)
        states.append(RequestState(new_request(request)))
    logits, positions = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), torch.arange(2)
    sampler = Sampler(8, 2, 64, torch.device("cpu"))
    both = sampler.sample(states, logits.clone(), positions).result().token_ids
    alone = Sampler(8, 2, 64, torch.device("cpu")).sample(states[1:], logits[1:].clone(), positions[1:]).result()
    assert both[0] in (3, 4) and both[1:] == alone.token_ids
