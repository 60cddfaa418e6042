"""The engine's greedy text is Hugging Face's token for token, however the work is cut, cached, batched, preempted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, make_engine, run_all, run_requests, run_steps
from huggingface_texts import greedy_continuations
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from tiny_heads import speculation

Texts = list[list[int]]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, prompts: Texts) -> Texts:
    return greedy_continuations(tiny_llama, prompts, max_tokens=24)


def _texts(engine: Engine, prompts: Texts, params: SamplingParams = GREEDY) -> Texts:
    return [told.token_ids for told in run_all(engine, prompts, params)]


def test_batch_is_huggingface(engine: Engine, prompts: Texts, expected: Texts) -> None:
    assert _texts(engine, prompts) == expected


def test_single_is_batch(engine: Engine, prompts: Texts, expected: Texts) -> None:
    assert [_texts(engine, [prompt])[0] for prompt in prompts] == expected


@pytest.mark.parametrize("budget", [5, 16, 37])
def test_chunked_is_whole(tiny_llama: Path, prompts: Texts, expected: Texts, budget: int) -> None:
    engine = make_engine(tiny_llama, scheduler={"max_num_batched_tokens": budget})
    assert _texts(engine, prompts) == expected


def test_prefix_hit_is_miss(tiny_llama: Path, prompts: Texts, expected: Texts) -> None:
    engine = make_engine(tiny_llama)
    assert _texts(engine, prompts) == expected
    before = engine.scheduler.cache.num_prefix_hits
    assert _texts(engine, prompts) == expected
    whole_blocks = sum((len(prompt) - 1) // 8 * 8 for prompt in prompts)
    assert engine.scheduler.cache.num_prefix_hits - before >= whole_blocks > 0


def test_prefix_cache_off(tiny_llama: Path, prompts: Texts, expected: Texts) -> None:
    engine = make_engine(tiny_llama, cache={"enable_prefix_caching": False})
    assert _texts(engine, prompts + prompts) == expected + expected
    assert engine.scheduler.cache.num_prefix_hits == 0


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_is_not(tiny_llama: Path, prompts: Texts, expected: Texts, caching: bool) -> None:
    cache = {"num_blocks": 20, "enable_prefix_caching": caching}
    engine = make_engine(tiny_llama, model={"max_model_len": 128}, cache=cache)
    requests = run_requests(engine, prompts, GREEDY)
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_preemptions for request in requests) > 0
    assert engine.scheduler.cache.num_used_blocks == 0


def test_guaranteed_no_evict_never_preempts(tiny_llama: Path, prompts: Texts, expected: Texts) -> None:
    engine = make_engine(
        tiny_llama,
        model={"max_model_len": 128},
        cache={"num_blocks": 20},
        scheduler={"policy": "guaranteed_no_evict"},
    )
    requests = run_requests(engine, prompts, GREEDY)
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_preemptions for request in requests) == 0


@pytest.mark.parametrize("method", ["", "mtp"])
@pytest.mark.parametrize("scheduler", [{}, {"overlap_scheduling": "on"}, {"max_num_batched_tokens": 40}])
def test_two_requests_that_fill_the_pool_run_together(
    tiny_llama: Path, prompts: Texts, engine: Engine, scheduler: dict[str, object], method: str, tmp_path: Path
) -> None:
    """Half of its 64 slots for each: the last token takes none, neither for drafts."""
    drafts = speculation(method, tiny_llama, tmp_path) if method else None
    tight = {"policy": "guaranteed_no_evict", **scheduler}
    full = make_engine(tiny_llama, {"max_model_len": 64}, {"num_blocks": 8}, tight, drafts)
    for num_prompt, max_tokens in ((32, 1), (24, 9)):
        pair, params = [prompt[:num_prompt] for prompt in prompts[-2:]], replace(GREEDY, max_tokens=max_tokens)
        requests = [full.submit(Request(prompt, params, handle=at))[0] for at, prompt in enumerate(pair)]
        full.step()
        assert not full.scheduler.num_waiting
        run_steps(full, {})
        assert full.error is None and not any(request.num_preemptions for request in requests)
        wanted = [told.token_ids for told in run_all(engine, pair, params)]
        assert [request.output_token_ids for request in requests] == wanted


def test_sampled_text_survives_preemption_and_chunks(tiny_llama: Path, engine: Engine, prompts: Texts) -> None:
    params = [
        SamplingParams(max_tokens=24, seed=i, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5)
        for i in range(len(prompts))
    ]
    expected = [told.token_ids for told in run_all(engine, prompts, params)]
    tight = make_engine(
        tiny_llama,
        model={"max_model_len": 128},
        cache={"num_blocks": 20},
        scheduler={"max_num_batched_tokens": 40},
    )
    assert [told.token_ids for told in run_all(tight, prompts, params)] == expected
    assert tight.stats is tight.scheduler.stats


def test_block_sizes_agree(tiny_llama: Path, prompts: Texts, expected: Texts) -> None:
    for block_size in (1, 64):
        engine = make_engine(tiny_llama, cache={"block_size": block_size, "num_blocks": 4096 // block_size})
        assert _texts(engine, prompts) == expected
