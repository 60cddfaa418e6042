"""Deterministic mode: a request gets the same tokens and log-probabilities, to the bit, whatever runs beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, run_all
from in_company import each_alone, together
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from speculation_config import speculation_config

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON = {"deterministic": True}
WANTED = [
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=60, temperature=0.9, seed=6, top_p=0.9, top_k=40, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=60, temperature=0.0, repetition_penalty=1.2, ignore_eos=True, logprobs=2),
] * 3  # for twelve texts
# Name -> how drafts are made; the demo model's own heads, whose trees and chains are taken in part.
DRAFTERS: dict[str, dict[str, object]] = {
    "ngram": {"methods": "ngram"},
    "draft_model": {"methods": "draft_model", "draft_model": "slipstream-demo-draft"},
    "medusa": {"methods": "medusa", "medusa_heads": "slipstream-demo-medusa"},
    "mtp": {"methods": "mtp", "mtp_module": "slipstream-demo-mtp"},
    "eagle": {"methods": "eagle", "eagle_head": "slipstream-demo-eagle"},
    "eagle_chain": {"methods": "eagle", "eagle_head": "slipstream-demo-eagle", "eagle_top_k": 1},
}


@pytest.fixture(scope="module")
def texts(demo_model: Path) -> list[list[int]]:
    """Twelve prompts of 3 to 700 tokens of this file: some have beginnings in common, as prefix reuse needs."""
    from slipstream.tokenizer.tokenizer import TextTokenizer

    token_ids = TextTokenizer.load(demo_model).encode(Path(__file__).read_text("utf-8"))
    dice = random.Random(3)
    starts = [0, 0, 0, *(dice.randrange(600) for _ in range(9))]
    return [
        token_ids[start : start + length]
        for start, length in zip(starts, (3, 200, 700, 64, 65, 17, 128, 90, 511, 5, 333, 48))
    ]


def make_demo_engine(demo_model: Path, **sections: dict[str, object]) -> Engine:
    """On the GPU in bf16; speculation: SpeculationConfig's, folders by their names."""
    speculation = dict(sections.get("speculation", {}))
    for field in ("draft_model", "medusa_heads", "mtp_module", "eagle_head"):
        if field in speculation:
            speculation[field] = str(demo_model.parent / str(speculation[field]))
    return make_engine(
        demo_model,
        model={"device": "cuda", "dtype": "bfloat16", "max_model_len": 2048, **ON, **sections.get("model", {})},
        cache={"block_size": 64, **sections.get("cache", {})},
        scheduler=sections.get("scheduler"),
        speculation=speculation_config(throttle="off", **speculation) if speculation else None,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def alone(demo_model: Path, texts: list[list[int]]) -> list[tuple]:
    """Every request by itself, its prompt in one step, without graphs, reuse or drafts."""
    engine = make_demo_engine(demo_model, model={"cuda_graphs": "off"}, cache={"enable_prefix_caching": False})
    return each_alone(engine, texts, WANTED)


COMPANY: dict[str, dict[str, dict[str, object]]] = {
    "graphs": {},
    "eager": {"model": {"cuda_graphs": "off"}},
    "one graph for all": {"model": {"cuda_graphs": "64"}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 70}},
    "odd chunks": {"scheduler": {"max_num_batched_tokens": 33}, "model": {"cuda_graphs": "off"}},
    "preempted": {"cache": {"num_blocks": 34}},
}


@needs_cuda
@pytest.mark.parametrize("name", COMPANY)
def test_company_changes_nothing(demo_model: Path, texts: list[list[int]], alone: list[tuple], name: str) -> None:
    assert together(make_demo_engine(demo_model, **COMPANY[name]), texts, WANTED, 9)[0] == alone


@needs_cuda
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_nothing(demo_model: Path, texts: list[list[int]], alone: list[tuple], name: str) -> None:
    engine = make_demo_engine(demo_model, speculation=DRAFTERS[name])
    assert together(engine, texts, WANTED, 9)[0] == alone
    assert each_alone(engine, texts[:4], WANTED) == alone[:4]


def texts_alone(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Without log-probabilities, penalties and the like, which verifications that are launched ahead do not serve."""
    return [run_all(engine, [prompt], [unasked(i)])[0].token_ids for i, prompt in enumerate(prompts)]


def unasked(place: int) -> SamplingParams:
    return replace(WANTED[place % 3], logprobs=None, max_tokens=40 + 7 * place)


@pytest.fixture(scope="module")
def unasked_alone(demo_model: Path, texts: list[list[int]]) -> list[list[int]]:
    return texts_alone(make_demo_engine(demo_model), texts)


@needs_cuda
@pytest.mark.parametrize("name", DRAFTERS)
def test_verifications_launched_ahead_change_nothing(
    demo_model: Path, texts: list[list[int]], unasked_alone: list[list[int]], name: str
) -> None:
    """Each sequence ends at another step, so that launches are taken up whole, in part, and dropped."""
    engine = make_demo_engine(demo_model, speculation=DRAFTERS[name], scheduler={"max_num_seqs": 8})
    found = run_all(engine, texts, [unasked(i) for i in range(len(texts))])
    assert [told.token_ids for told in found] == unasked_alone
    assert texts_alone(engine, texts[:4]) == unasked_alone[:4]


@needs_cuda
@pytest.mark.parametrize(
    "quantization, kv_type, block_size",
    [("fp8", "auto", 64), ("wint8", "int8", 64), ("none", "fp8_e4m3", 64), ("fp8", "int4", 32), ("none", "auto", 16)],
)
def test_so_it_is_with_other_weights_caches_and_blocks(
    demo_model: Path, texts: list[list[int]], quantization: str, kv_type: str, block_size: int
) -> None:
    cache = {"dtype": kv_type, "block_size": block_size, "num_blocks": 2048}
    types = {"model": {"quantization": quantization}, "cache": cache}
    expected = each_alone(make_demo_engine(demo_model, **types), texts, WANTED)
    engine = make_demo_engine(demo_model, **types, speculation=DRAFTERS["eagle"])
    assert together(engine, texts, WANTED, 9)[0] == expected


@needs_cuda
def test_the_fast_kernels_say_nearly_the_same(demo_model: Path, texts: list[list[int]], alone: list[tuple]) -> None:
    """Compares the first token; later ones may differ, as one rounding decides a draw near a border of two tokens."""
    engine = make_demo_engine(demo_model, model={"deterministic": False})
    for (_, fast), (_, exact) in zip(each_alone(engine, texts, WANTED), alone):
        (_, fast_top), (_, exact_top) = fast[0], exact[0]
        common = dict(fast_top).keys() & dict(exact_top).keys()
        assert common  # the two most likely tokens, or one of them where others are as likely
        assert all(abs(dict(fast_top)[token] - dict(exact_top)[token]) < 0.25 for token in common)  # bf16 logits


def test_a_cpu_serves_it_in_float32(tiny_llama: Path, engine: Engine, prompts: list[list[int]]) -> None:
    deterministic = make_engine(tiny_llama, model=ON)
    found = [told.token_ids for told in run_all(deterministic, prompts, GREEDY)]
    assert found == [told.token_ids for told in run_all(engine, prompts, GREEDY)]


@pytest.mark.parametrize(
    "field, model, speculation",
    [
        ("quantization", {"quantization": "wint4"}, {}),
        ("quantization", {"quantization": "w8a8_int8"}, {}),
        ("attention_backend", {"attention_backend": "paged"}, {}),
        ("dtype", {"dtype": "bfloat16"}, {}),
        ("speculative_acceptance", {}, {"methods": "ngram", "acceptance": "typical"}),
    ],
)
def test_what_it_cannot_have_is_refused(
    tiny_llama: Path, field: str, model: dict[str, object], speculation: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=f"{field}.*deterministic"):
        make_engine(tiny_llama, model={**ON, **model}, speculation=speculation_config(**speculation))  # type: ignore[arg-type]


def test_a_request_may_not_ask_for_lossy_acceptance(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(tiny_llama, model=ON, speculation=speculation_config("ngram"))
    lossy = replace(GREEDY, temperature=0.5, speculative_acceptance="rejection")
    with pytest.raises(RequestError, match="speculative_acceptance"):
        engine.submit(Request(list(prompts[0]), lossy))
