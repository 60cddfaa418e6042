"""Layers with a window hold only the blocks that they need, and the text is that of layers that hold every token."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, model_worker, run_all, run_requests, run_steps
from huggingface_texts import greedy_continuations
from prompted_heads import Prompter
from rehearsed_graphs import num_replays, rehearse_graphs
from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from slipstream.core.request import Request
from slipstream.engine.engine import Engine
from slipstream.nn.read_spec import read_spec
from slipstream.worker.hardware import Hardware
from slipstream.worker.plan_memory import plan_memory
from tiny_checkpoints import make_checkpoint
from tiny_heads import speculation
from tiny_model import make_tiny_windowed, save_tokenizer

Texts = list[list[int]]
WINDOW, SIZE, BUDGET = 24, 8, 40
GREEDY_LONG = replace(GREEDY, max_tokens=48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_windowed(tmp_path_factory.mktemp("windowed"), WINDOW)


@pytest.fixture(scope="module")
def prompts() -> Texts:
    """Up to ten windows long; the last three begin with the same hundred tokens."""
    dice = random.Random(3)
    draw = lambda count: [dice.randrange(3, 260) for _ in range(count)]  # noqa: E731
    common = draw(100)
    return [draw(1), draw(24), draw(65), draw(240), common + draw(3), common + draw(50), common + draw(20)]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: Texts) -> Texts:
    return greedy_continuations(model, prompts, max_tokens=48)


def _engine(
    model: Path, num_blocks: int = 600, speculation: SpeculationConfig | None = None, **sections: object
) -> Engine:
    cache = {"num_blocks": num_blocks, **sections.pop("cache", {})}  # type: ignore[dict-item]
    scheduler = {"max_num_batched_tokens": BUDGET, **sections.pop("scheduler", {})}  # type: ignore[dict-item]
    return make_engine(model, {"max_model_len": 320}, cache, scheduler, speculation)


def _texts(engine: Engine, prompts: Texts) -> Texts:
    return [told.token_ids for told in run_all(engine, prompts, GREEDY_LONG)]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_text_in_chunks_and_behind_prefixes(model: Path, prompts: Texts, expected: Texts, overlap: str) -> None:
    engine = _engine(model, scheduler={"overlap_scheduling": overlap})
    groups = engine.memory_plan.groups
    assert (groups.num_full, groups.num_windowed, groups.of_layers) == (1, 3, (0, 1, 2, 3))
    for _ in range(2):
        assert _texts(engine, prompts) == expected
    again = run_requests(engine, prompts, GREEDY_LONG)
    assert [request.output_token_ids for request in again] == expected
    assert [request.num_cached_tokens for request in again] == [(len(prompt) - 1) // SIZE * SIZE for prompt in prompts]


def test_one_prompt_goes_on_from_another(model: Path, prompts: Texts, expected: Texts) -> None:
    """The next turn of a conversation finds the last window, which its first turn had just read."""
    engine = _engine(model)
    assert _texts(engine, [prompts[3]]) == [expected[3]]
    turn = [*prompts[3], *expected[3][:16]]
    (request,) = run_requests(engine, [turn], replace(GREEDY, max_tokens=32))
    assert request.output_token_ids == expected[3][16:] and request.num_cached_tokens >= 240


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize("caching", [True, False])
def test_text_where_blocks_are_short(model: Path, prompts: Texts, expected: Texts, policy: str, caching: bool) -> None:
    engine = _engine(model, num_blocks=68, cache={"enable_prefix_caching": caching}, scheduler={"policy": policy})
    requests = run_requests(engine, prompts, GREEDY_LONG)
    assert [request.output_token_ids for request in requests] == expected
    num_preemptions = sum(request.num_preemptions for request in requests)
    assert (num_preemptions > 0) is (policy == "max_utilization" and caching)
    assert engine.scheduler.cache.num_used_blocks == 0 and engine.error is None


def test_sequences_of_one_request_share_its_prompt(model: Path, prompts: Texts, expected: Texts) -> None:
    engine = _engine(model)
    sequences = engine.submit(Request(list(prompts[3]), replace(GREEDY_LONG, n=3)))
    run_steps(engine, {})
    assert [sequence.output_token_ids for sequence in sequences] == [expected[3]] * 3
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 232, 232]


def test_a_windowed_layer_holds_its_window_and_a_step(model: Path, prompts: Texts) -> None:
    engine = _engine(model)
    request = engine.submit(Request(list(prompts[3]), GREEDY_LONG))[0]
    windows, most_in_prompt, most_after = engine.scheduler.cache.windows, 0, 0
    assert windows is not None
    while engine.has_work:
        engine.step()
        num_held = len(windows.held(request)) // 3
        if request.num_output_tokens:
            most_after = max(most_after, num_held)
        else:
            most_in_prompt = max(most_in_prompt, num_held)
    assert 0 < most_in_prompt <= (WINDOW + BUDGET) // SIZE + 1
    # the first token comes while the prompt's last chunk is still held
    assert 0 < most_after <= most_in_prompt
    assert len(engine.scheduler.cache.pool._cached) == engine.scheduler.cache.num_blocks - len(
        engine.scheduler.cache.pool._empty
    )


def test_decoding_holds_no_more_than_the_window(model: Path) -> None:
    engine = _engine(model)
    request = engine.submit(Request([5, 6, 7], replace(GREEDY, max_tokens=150)))[0]
    windows, most = engine.scheduler.cache.windows, 0
    assert windows is not None
    while engine.has_work:
        engine.step()
        most = max(most, len(windows.held(request)) // 3)
    assert most == WINDOW // SIZE + 1


@pytest.mark.parametrize("method", ["ngram", "draft_model", "medusa", "mtp", "eagle", "eagle3"])
@pytest.mark.parametrize("graphs", [False, True])
def test_text_with_drafts(
    model: Path,
    prompts: Texts,
    expected: Texts,
    method: str,
    graphs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains and trees, verified one step ahead of being read, in graphs and without."""
    if graphs:
        rehearse_graphs(monkeypatch, (2, 4, 8))
    engine = _engine(model, 400, speculation(method, model, tmp_path), scheduler={"overlap_scheduling": "on"})
    assert engine.memory_plan.groups.num_windowed == 3
    Prompter({place: [*prompt, *text] for place, (prompt, text) in enumerate(zip(prompts, expected))}).attend(engine)
    references = [replace(GREEDY_LONG, reference_ids=tuple(text)) for text in expected]
    params = references if method == "ngram" else [GREEDY_LONG] * len(prompts)
    requests = [
        engine.submit(Request(list(prompt), one, handle=place))[0]
        for place, (prompt, one) in enumerate(zip(prompts, params))
    ]
    run_steps(engine, {})
    assert engine.error is None
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_accepted_tokens for request in requests) > 20
    assert engine.scheduler.cache.num_used_blocks == 0
    if graphs:
        assert num_replays(model_worker(engine).runner._graphs) > 0


@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "gpt-oss", "olmo3", "qwen2-tied-windows", "qwen2-moe-windows"])
def test_text_of_each_family(variant: str, tmp_path: Path) -> None:
    """Against the same engine whose layers hold everything, over seven windows."""
    make_checkpoint(variant, tmp_path)
    save_tokenizer(tmp_path)
    dice = random.Random(1)
    prompts = [[dice.randrange(3, 97) for _ in range(count)] for count in (1, 12, 35, 30, 33)]
    prompts[3:] = [prompts[2][:25] + prompt for prompt in (prompts[3][:5], prompts[4][:8])]
    params = replace(GREEDY, max_tokens=26)
    texts = {}
    for is_hybrid in (False, True):
        cache = {"block_size": 4, "num_blocks": 80, "enable_hybrid_kv_cache": is_hybrid}
        engine = make_engine(tmp_path, cache=cache, scheduler={"max_num_batched_tokens": 16})
        assert (engine.memory_plan.groups.num_windowed > 0) is is_hybrid
        texts[is_hybrid] = [told.token_ids for told in run_all(engine, prompts * 2, params)]
    assert texts[True] == texts[False] and len({tuple(text) for text in texts[True]}) >= 4


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        ({"enable_hybrid_kv_cache": False}, "enable_hybrid_kv_cache is off"),
        ({"host_memory_bytes": 1 << 20}, "kv_cache_host_memory_bytes keeps blocks of all layers together"),
    ],
)
def test_the_plan_says_why_windowed_layers_hold_everything(
    model: Path, prompts: Texts, expected: Texts, cache: dict[str, object], reason: str
) -> None:
    engine = _engine(model, cache=cache)
    assert engine.memory_plan.groups.num_groups == 1
    assert f"windowed layers hold every token: {reason}" in str(engine.memory_plan)
    assert _texts(engine, prompts[-2:]) == expected[-2:]


def test_the_pool_holds_more_tokens(model: Path) -> None:
    """In the same bytes: one layer in four holds 40 blocks of a sequence of 320 tokens, the others 4 at most."""
    hardware = Hardware(torch.device("cpu"), torch.float32, torch.float32)
    plans = {}
    for is_hybrid in (False, True):
        cache = CacheConfig(block_size=SIZE, memory_bytes=1 << 20, enable_hybrid_kv_cache=is_hybrid)
        settings = ModelConfig(model=str(model), device="cpu", max_model_len=320)
        plans[is_hybrid] = plan_memory(read_spec(model), EngineConfig(model=settings, cache=cache), hardware, 1 << 32)
    assert plans[True].pool_bytes <= plans[False].pool_bytes <= 1 << 20
    grown = plans[True].pool_tokens / plans[False].pool_tokens
    assert grown == pytest.approx(4 * 40 / (40 + 3 * 4), rel=0.1)
    assert plans[True].num_full_sequences >= 2 * plans[False].num_full_sequences
    assert "3 of 4 groups of layers hold 23 tokens and a step" in str(plans[True])
