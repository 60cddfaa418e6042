"""All kernels of draws are compiled at start, whatever requests ask for: nobody waits for a compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_kernels import DRAWS, note_draws
from engine_driver import GREEDY, Told, make_engine, model_worker, run_all
from slipstream.core.sampling_params import Guide

SHORT = replace(GREEDY, max_tokens=4)
SAMPLED = replace(SHORT, temperature=0.9, seed=5)
KINDS = (
    replace(SAMPLED, repetition_penalty=1.3),
    replace(SHORT, presence_penalty=0.4, frequency_penalty=0.5),
    replace(SHORT, logit_bias=((9, 3.0), (11, -1.0)), bad_words_ids=((4, 5), (7,))),
    replace(SAMPLED, min_tokens=3, stop_token_ids=(5, 6, 7), logprobs=0),
    replace(SHORT, prompt_logprobs=3),
    replace(SAMPLED, guide=Guide("regex", "[a-z]{3}")),
)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_nothing_is_compiled_behind_the_start(
    overlap: str, tiny_llama: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    engine = make_engine(tiny_llama, scheduler={"overlap_scheduling": overlap})
    compiled = note_draws(monkeypatch)
    sampler, most = model_worker(engine).runner._sampler, engine.config.serving.max_logprobs
    sampler.warm_up(torch.zeros(1, engine.spec.vocab_size), most)
    at_start = set(compiled)
    compiled.clear()
    for params in KINDS:
        for count in (1, 3):
            run_all(engine, [prompt * 3 for prompt in prompts[:count]], params)
    for num_logprobs in range(most + 1):
        run_all(engine, prompts[:2], replace(SHORT, logprobs=num_logprobs))
    run_all(engine, prompts[: len(KINDS)], list(KINDS))
    assert {kernel for kernel, *_ in compiled} == {name for _, kernels in DRAWS.values() for name in kernels}
    assert compiled <= at_start, compiled - at_start


def test_as_many_alternatives_as_asked_for(tiny_llama: Path, prompts: list[list[int]]) -> None:
    """A kernel finds more of them than some requests want, also in one batch."""
    engine = make_engine(tiny_llama)
    counts = (0, 1, 2, 5, 6, 20)
    told = run_all(engine, [prompts[0]] * len(counts), [replace(SHORT, logprobs=count) for count in counts])
    most = told[-1]
    for count, one in zip(counts, told):
        assert [len(entry.top) for entry in one.logprobs] == [count] * SHORT.max_tokens
        assert _tops(one, count) == _tops(most, count)


def _tops(told: Told, count: int) -> list[list[tuple[int, float]]]:
    found = [entry.top[:count] for entry in told.logprobs]
    return [[(token_id, pytest.approx(value, abs=1e-5)) for token_id, value in top] for top in found]
