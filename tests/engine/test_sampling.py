"""Sampling through the whole engine: distributions, seeds, penalties, bans, ends, log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, run_all, run_steps
from slipstream.core.errors import RequestError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.input_processor import InputProcessor
from slipstream.worker.sample import logprobs
from transformers import AutoModelForCausalLM, LlamaForCausalLM

PROMPT = [70, 201, 33, 90, 14]
RANDOM = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


def _logits(model: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def _run_n(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Told]:
    """The n sequences of one request."""
    sequences = engine.submit(Request(list(prompt), params, handle=1))
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    return [told[sequence] for sequence in sequences]


# ---- distribution


@pytest.mark.parametrize(
    "params",
    [
        replace(RANDOM, max_tokens=1),
        replace(RANDOM, max_tokens=1, temperature=0.6, top_k=12),
        replace(RANDOM, max_tokens=1, temperature=1.4, top_p=0.7),
        replace(RANDOM, max_tokens=1, min_p=0.1),
    ],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_tokens_follow_the_distribution(engine: Engine, reference: LlamaForCausalLM, params: SamplingParams) -> None:
    """A chi-squared test of first tokens; seeds are fixed, so it passes always or never."""
    probs = _filtered(_logits(reference, PROMPT)[-1], params)
    num_draws = 128 * 16
    counts = torch.zeros(probs.shape[0])
    for seed in range(16):
        for told in _run_n(engine, PROMPT, replace(params, seed=seed, n=128)):
            counts[told.token_ids[0]] += 1
    assert counts[probs == 0].sum() == 0, "a filtered token was drawn"
    common = probs * num_draws >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * num_draws
    used = expected > 0
    chi2 = ((observed[used] - expected[used]) ** 2 / expected[used]).sum().item()
    freedom = int(used.sum()) - 1
    assert freedom >= 3
    assert chi2 < freedom + 4.0 * (2 * freedom) ** 0.5, f"chi2 {chi2:.1f} at {freedom} degrees of freedom"


def _filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    logits = logits.double() / params.temperature
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1:
        probs, order = logits.softmax(0).sort(descending=True)
        logits[order[probs.cumsum(0) - probs >= params.top_p]] = -torch.inf
    probs = logits.softmax(0)
    if params.min_p:
        logits[probs < params.min_p * probs.max()] = -torch.inf
    return logits.softmax(0)


# ---- seeds


def test_same_seed_same_text_in_any_company(engine: Engine, prompts: list[list[int]]) -> None:
    wanted = replace(RANDOM, seed=11)
    alone = run_all(engine, [PROMPT], wanted)[0].token_ids
    company = [replace(RANDOM, seed=i, temperature=0.5 + i / 9, top_k=i) for i in range(len(prompts))]
    crowd = run_all(engine, [*prompts[:6], PROMPT, *prompts[6:]], [*company[:6], wanted, *company[6:]])
    assert crowd[6].token_ids == alone
    assert run_all(engine, [PROMPT], replace(RANDOM, seed=12))[0].token_ids != alone


def test_seeds_of_64_bits_and_none(engine: Engine) -> None:
    texts = [run_all(engine, [PROMPT], replace(RANDOM, seed=seed))[0].token_ids for seed in (-1, 2**64 - 1, 2**63, 0)]
    assert texts[0] == texts[1], "-1 and 2^64-1 are the same 64 bits"
    assert len({tuple(text) for text in texts}) == 3
    unseeded = [tuple(run_all(engine, [PROMPT], RANDOM)[0].token_ids) for _ in range(3)]
    assert len(set(unseeded)) == 3


def test_n_sequences_differ_and_repeat(engine: Engine) -> None:
    params = replace(RANDOM, n=4, seed=5)
    first = [told.token_ids for told in _run_n(engine, PROMPT, params)]
    assert len({tuple(text) for text in first}) == 4
    assert [told.token_ids for told in _run_n(engine, PROMPT, params)] == first
    assert first[0] == run_all(engine, [PROMPT], replace(RANDOM, seed=5))[0].token_ids


# ---- edits of the logits


def test_penalties_are_huggingface_and_openai_formulas(engine: Engine, reference: LlamaForCausalLM) -> None:
    params = replace(GREEDY, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4, max_tokens=20)
    prompt = [*PROMPT, *PROMPT]
    got = run_all(engine, [[9, 9], prompt], [GREEDY, params])[1].token_ids
    token_ids = list(prompt)
    for token_id in got:
        logits = _logits(reference, token_ids)[-1].clone()
        for seen in set(token_ids):
            logits[seen] = logits[seen] / 1.5 if logits[seen] > 0 else logits[seen] * 1.5
        output = token_ids[len(prompt) :]
        for seen in set(output):
            logits[seen] -= 0.4 * output.count(seen) + 0.7
        assert token_id == int(logits.argmax())
        token_ids.append(token_id)
    assert got != run_all(engine, [prompt], replace(GREEDY, max_tokens=20))[0].token_ids


def test_logit_bias_forces_and_forbids(engine: Engine) -> None:
    assert run_all(engine, [PROMPT], replace(GREEDY, logit_bias=((7, 100.0),)))[0].token_ids == [7] * 24
    free = run_all(engine, [PROMPT], GREEDY)[0].token_ids
    banned = free[0]
    other = run_all(engine, [PROMPT, PROMPT], [replace(GREEDY, logit_bias=((banned, -100.0),)), GREEDY])
    assert banned not in other[0].token_ids
    assert other[1].token_ids == free, "the neighbour is untouched"


def test_only_allowed_tokens_are_drawn(engine: Engine) -> None:
    free = run_all(engine, [PROMPT], GREEDY)[0].token_ids
    eos = engine.spec.eos_token_ids[0]
    limited = replace(RANDOM, temperature=100.0, max_tokens=40, allowed_token_ids=(9, 7, 9), ignore_eos=False)
    few, neighbour = run_all(engine, [PROMPT, PROMPT], [limited, GREEDY])
    assert set(few.token_ids) == {7, 9} and few.finish_reason is FinishReason.LENGTH
    assert neighbour.token_ids == free, "the neighbour is untouched"
    among = tuple({*free, 7, 9})
    assert run_all(engine, [PROMPT], replace(GREEDY, allowed_token_ids=among))[0].token_ids == free
    biased = replace(GREEDY, allowed_token_ids=(7, 9), logit_bias=((9, 100.0), (8, 100.0)))
    assert run_all(engine, [PROMPT], biased)[0].token_ids == [9] * 24
    banned = replace(GREEDY, allowed_token_ids=(7, 9), bad_words_ids=((7,),))
    assert run_all(engine, [PROMPT], banned)[0].token_ids == [9] * 24
    end = replace(GREEDY, allowed_token_ids=(eos,), ignore_eos=False)
    assert run_all(engine, [PROMPT], end)[0].token_ids == [eos]
    too_early = run_all(engine, [PROMPT], replace(end, min_tokens=3))[0].token_ids
    assert set(too_early) == {eos}, "no other token, though min_tokens bans the only one"


def test_bad_words_ban_sequences_only(engine: Engine) -> None:
    free = run_all(engine, [PROMPT], GREEDY)[0].token_ids
    single = run_all(engine, [PROMPT], replace(GREEDY, bad_words_ids=((free[0],),)))[0].token_ids
    assert free[0] not in single
    pair = (free[3], free[4])
    banned = run_all(engine, [PROMPT], replace(GREEDY, bad_words_ids=(pair,)))[0].token_ids
    assert banned[:4] == free[:4] and banned[4] != free[4], "only the word's last token, only after its first"


def test_bad_words_as_text(engine: Engine) -> None:
    word = "the"
    favoured = {i for text in (word, " " + word) for i in engine.tokenizer.encode(text, add_special_tokens=False)}
    bias = tuple((token_id, 100.0) for token_id in favoured)
    wanted = replace(RANDOM, seed=1, max_tokens=40, logit_bias=bias)
    assert word in engine.tokenizer.decode(run_all(engine, [PROMPT], wanted)[0].token_ids)
    without = run_all(engine, [PROMPT], replace(wanted, bad_words=(word,)))[0].token_ids
    assert word not in engine.tokenizer.decode(without)


# ---- where a text ends


def test_eos_ends_unless_ignored(engine: Engine) -> None:
    eos = engine.spec.eos_token_ids[0]
    push = SamplingParams(max_tokens=8, temperature=0.0, logit_bias=((eos, 100.0),))
    ended, ignored = run_all(engine, [PROMPT, PROMPT], [push, replace(push, ignore_eos=True)])
    assert (ended.token_ids, ended.finish_reason) == ([eos], FinishReason.STOP)
    assert (ignored.token_ids, ignored.finish_reason) == ([eos] * 8, FinishReason.LENGTH)


def test_min_tokens_bans_every_end(engine: Engine) -> None:
    eos = engine.spec.eos_token_ids[0]
    params = SamplingParams(
        max_tokens=9, min_tokens=5, temperature=0.0, stop_token_ids=(7,), logit_bias=((eos, 100.0), (7, 90.0))
    )
    told = run_all(engine, [PROMPT], params)[0]
    assert len(told.token_ids) == 6 and told.token_ids[-1] == eos
    assert not {eos, 7} & set(told.token_ids[:5])
    assert told.finish_reason is FinishReason.STOP


def test_stop_ids_words_and_end_id(engine: Engine) -> None:
    free = run_all(engine, [PROMPT], GREEDY)[0].token_ids
    by_id = run_all(engine, [PROMPT], replace(GREEDY, stop_token_ids=(free[4],)))[0]
    first = free.index(free[4])
    assert (by_id.token_ids, by_id.finish_reason) == (free[: first + 1], FinishReason.STOP)
    by_word = run_all(engine, [PROMPT], replace(GREEDY, stop_words_ids=((free[2], free[3]),)))[0]
    assert (by_word.token_ids, by_word.finish_reason) == (free[:4], FinishReason.STOP)
    by_end = run_all(engine, [PROMPT], replace(GREEDY, end_id=free[4], ignore_eos=False))[0]
    assert (by_end.token_ids, by_end.finish_reason) == (free[: first + 1], FinishReason.STOP)


def test_max_model_len_ends(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, model={"max_model_len": 20})
    told = run_all(engine, [PROMPT], replace(GREEDY, max_tokens=100))[0]
    assert (len(told.token_ids), told.finish_reason) == (15, FinishReason.LENGTH)


# ---- log-probabilities


def test_logprobs_are_log_softmax(engine: Engine, reference: LlamaForCausalLM) -> None:
    """They are those of the model's own logits: a penalty or a temperature does not change them."""
    params = replace(RANDOM, seed=3, temperature=0.7, logprobs=4, presence_penalty=1.0)
    request = Request(list(PROMPT), params)
    engine.submit(request)
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    token_ids, entries = told[request].token_ids, told[request].logprobs
    expected = _logits(reference, PROMPT + token_ids).log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert [entry.token_id for entry in entries] == token_ids
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=2e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        top = row.topk(4)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=2e-4)
    assert request.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in entries))


def test_logprobs_only_for_who_asked(engine: Engine) -> None:
    asked, zero, silent = run_all(
        engine, [PROMPT] * 3, [replace(GREEDY, logprobs=2), replace(GREEDY, logprobs=0), GREEDY]
    )
    assert len(asked.logprobs) == len(zero.logprobs) == 24 and silent.logprobs == []
    assert all(entry.top == [] for entry in zero.logprobs)
    assert [entry.logprob for entry in asked.logprobs] == [entry.logprob for entry in zero.logprobs]


@pytest.mark.parametrize(("budget", "max_rows"), [(2048, 256), (2048, 16), (7, 256), (50, 16)])
def test_prompt_logprobs(
    tiny_llama: Path,
    prompts: list[list[int]],
    reference: LlamaForCausalLM,
    budget: int,
    max_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole, in chunks or in pieces of them, and never shortened by a prefix that is cached already."""
    monkeypatch.setattr(logprobs, "MAX_PROMPT_ROWS", max_rows)
    engine = make_engine(tiny_llama, scheduler={"max_num_batched_tokens": budget})
    chosen = [prompts[0], prompts[4], prompts[9]]
    run_all(engine, chosen, GREEDY)
    for prompt, told in zip(chosen, run_all(engine, chosen, replace(GREEDY, prompt_logprobs=2))):
        entries = told.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        expected = _logits(reference, prompt).log_softmax(-1)
        for position in range(1, len(prompt)):
            entry = entries[position]
            assert entry is not None and entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=2e-4)
            assert [token_id for token_id, _ in entry.top] == expected[position - 1].topk(2).indices.tolist()


def test_prompt_logprobs_once_for_n(engine: Engine, prompts: list[list[int]]) -> None:
    told = _run_n(engine, prompts[5], replace(RANDOM, n=3, prompt_logprobs=0))
    assert told[0].prompt_logprobs is not None and len(told[0].prompt_logprobs) == len(prompts[5])
    assert told[1].prompt_logprobs is None and told[2].prompt_logprobs is None


def test_a_bias_per_token_forces(engine: Engine) -> None:
    biases = tuple(100.0 if token_id == 7 else 0.0 for token_id in range(engine.spec.vocab_size))
    assert run_all(engine, [PROMPT], replace(GREEDY, embedding_bias=biases))[0].token_ids == [7] * 24
    assert run_all(engine, [PROMPT], replace(GREEDY, embedding_bias=(*biases, 0.0, 0.0)))[0].token_ids == [7] * 24


def test_no_end_token_leaves_every_token_free(engine: Engine) -> None:
    """end_id=-1 is "none": as an index it would be the last token of the vocabulary, or the row before."""
    last = engine.spec.vocab_size - 1
    params = replace(GREEDY, end_id=-1, ignore_eos=False, min_tokens=4, max_tokens=4, logit_bias=((last, 100.0),))
    assert run_all(engine, [PROMPT, PROMPT], params)[1].token_ids == [last] * 4


def test_end_tokens_that_the_checkpoint_does_not_have_are_dropped(engine: Engine) -> None:
    spec = replace(engine.spec, eos_token_ids=(1, -1, engine.spec.vocab_size))
    request = Request(list(PROMPT), replace(GREEDY, ignore_eos=False))
    processor = InputProcessor(spec, engine.tokenizer, engine.config.structured_output)
    assert processor.prepare(request)[0].eos_token_ids == {1}


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", SamplingParams(logit_bias=((10**6, 1.0),))),
        ("embedding_bias", SamplingParams(embedding_bias=(0.0,) * 10**6 + (1.0,))),
        ("stop_token_ids", SamplingParams(stop_token_ids=(99999,))),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(5, 99999))),
        ("bad_words_ids", SamplingParams(bad_words_ids=((1, 99999),))),
        ("stop_words_ids", SamplingParams(stop_words_ids=((1, 99999),))),
        ("end_id", SamplingParams(end_id=99999)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, field: str, params: SamplingParams) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(Request(list(PROMPT), params))
    assert caught.value.field == field
    assert not engine.has_work
