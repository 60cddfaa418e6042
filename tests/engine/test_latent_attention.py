"""A model of latent attention in the engine: Hugging Face's greedy text, cut, cached, moved or drafted."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from engine_driver import GREEDY, make_engine, model_worker, run_all, run_requests
from huggingface_texts import greedy_continuations
from rehearsed_graphs import num_replays, rehearse_graphs
from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.engine.engine import Engine
from speculation_config import speculation_config
from tiny_checkpoints import make_checkpoint
from tiny_heads import make_medusa
from tiny_latent_mtp import add_mtp, dense_mtp
from tiny_model import save_tokenizer

Texts = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint("deepseek-v3", tmp_path_factory.mktemp("latent"), max_position_embeddings=160).path
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> Texts:
    dice = random.Random(5)
    return [[dice.randrange(3, 97) for _ in range(length)] for length in (1, 9, 31, 40, 66, 90)]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: Texts) -> Texts:
    return greedy_continuations(model, prompts, max_tokens=24)


@pytest.fixture
def unabsorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of more than 4 tokens make keys and values of each head, of 16 cached tokens at a time."""
    monkeypatch.setattr("slipstream.worker.input_batch.MAX_DECODE_QUERY_LEN", 4)
    monkeypatch.setattr("slipstream.nn.attention.latent.ABSORBED_QUERIES", 5)
    monkeypatch.setattr("slipstream.nn.attention.latent.PREFIX_TOKENS", 16)


def texts(engine: Engine, prompts: Texts) -> Texts:
    return [told.token_ids for told in run_all(engine, prompts, GREEDY)]


@pytest.mark.usefixtures("unabsorbed")
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_chunks_and_prefixes(model: Path, prompts: Texts, expected: Texts, overlap: str) -> None:
    engine = make_engine(model, scheduler={"max_num_batched_tokens": 21, "overlap_scheduling": overlap})
    for _ in range(2):
        assert texts(engine, prompts) == expected
    assert engine.scheduler.cache.num_prefix_hits >= sum((len(prompt) - 1) // 8 * 8 for prompt in prompts)


@pytest.mark.parametrize("cache", [{}, {"host_memory_bytes": 8 << 20}], ids=["computed-again", "from-the-host"])
def test_preempted_is_not(model: Path, prompts: Texts, expected: Texts, cache: dict[str, object]) -> None:
    engine = make_engine(model, model={"max_model_len": 128}, cache={"num_blocks": 20, **cache})
    requests = run_requests(engine, prompts, GREEDY)
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_preemptions for request in requests) > 0
    assert not cache or engine.scheduler.cache.host.num_loaded > 0


@pytest.mark.parametrize("method", ["ngram", "medusa"])
def test_drafts_and_trees_leave_the_text_alone(
    model: Path, prompts: Texts, expected: Texts, method: str, tmp_path: Path
) -> None:
    """Medusa's trees are masked in the absorbed kernel, and accepted branches are compacted row by row."""
    fields = {"medusa_heads": str(make_medusa(model, tmp_path))} if method == "medusa" else {}
    engine = make_engine(model, speculation=speculation_config(method, throttle="off", **fields))
    requests = run_requests(engine, prompts, GREEDY)
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_drafted_tokens for request in requests) > 0


@pytest.mark.usefixtures("unabsorbed")
def test_a_draft_model_sees_what_is_before_a_chunk(model: Path, prompts: Texts) -> None:
    """As its own draft model, a model drafts what it will say, however its prompts were cut."""
    speculation = speculation_config("draft_model", throttle="off", draft_model=str(model), draft_sampling="greedy")
    engine = make_engine(model, scheduler={"max_num_batched_tokens": 21}, speculation=speculation)
    requests = run_requests(engine, prompts, GREEDY)
    num_drafted = sum(request.num_drafted_tokens for request in requests)
    assert 0 < num_drafted == sum(request.num_accepted_tokens for request in requests)


@pytest.fixture(scope="module")
def with_mtp(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the module that such checkpoints have behind their last layer."""
    folder = tmp_path_factory.mktemp("mtp")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    add_mtp(folder)
    return folder


@pytest.mark.parametrize("in_graphs", [False, True], ids=["eager", "graphs"])
def test_mtp_of_the_checkpoint_leaves_the_text_alone(
    with_mtp: Path, prompts: Texts, expected: Texts, in_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs all rows are absorbed, prompts too, and heads draft behind verifications."""
    if in_graphs:
        rehearse_graphs(monkeypatch, (2, 4, 8))
    speculation = speculation_config("mtp", throttle="off", num_draft_tokens=3)
    engine = make_engine(with_mtp, scheduler={"overlap_scheduling": "on"}, speculation=speculation)
    requests = run_requests(engine, prompts, GREEDY)
    assert not in_graphs or num_replays(model_worker(engine).runner._graphs) > 0
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_drafted_tokens for request in requests) > 0


def test_mtp_drafts_what_its_formulas_say(with_mtp: Path, prompts: Texts) -> None:
    """Drafts by Hugging Face's layer over pairs of next token and final state; later passes are handed the
    layer's own result."""
    speculation = speculation_config("mtp", throttle="off", num_draft_tokens=4)
    for prompt in prompts[1:5]:
        engine, request = make_engine(with_mtp, speculation=speculation), Request(list(prompt), GREEDY)
        engine.submit(request)
        engine.step()
        assert request.draft_token_ids == dense_mtp(with_mtp, prompt, 4)


@pytest.mark.usefixtures("unabsorbed")
def test_fp8_rows_are_the_same_in_chunks_and_behind_prefixes(model: Path, prompts: Texts) -> None:
    """Own tokens of a prompt are read from the cache, too, so that a chunk sees what a later one will."""
    cache = {"dtype": "fp8_e4m3"}
    whole = make_engine(model, cache=cache)
    assert whole.memory_plan.block_bytes == 3 * 8 * (128 + 4 + 2 * 8)
    expected = texts(whole, prompts)
    chunked = make_engine(model, cache=cache, scheduler={"max_num_batched_tokens": 21})
    assert [texts(chunked, prompts) for _ in range(2)] == [expected, expected]


def test_what_latents_are_not_kept_in(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype='int8': latents are kept .*; accepted: auto, \w+ or fp8_e4m3$"
    ):
        make_engine(model, cache={"dtype": "int8"})


def test_the_plan_counts_keys_and_values_of_prompts(model: Path) -> None:
    """Those of a step's tokens and of one piece of cached ones, in fp32."""
    small, large = (
        make_engine(model, scheduler={"max_num_batched_tokens": size}).memory_plan.workspace_bytes for size in (16, 116)
    )
    heads, row, absorbed = 6, 128 + 8, 128 + 8 + 128
    piece = 8192 * (heads * (24 + 20) + row) * 4
    assert small > piece and large - small >= 100 * (heads * (32 + absorbed) + row) * 4
