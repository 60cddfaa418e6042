"""Blocks in host memory: what the pool gave up comes back instead of being computed again, and the text is the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, run_all
from prompted_heads import Prompter
from slipstream.core.errors import ConfigError
from slipstream.core.stats import METRICS, Metric
from slipstream.engine.engine import Engine
from tiny_heads import speculation
from tiny_model import make_tiny_llama

Texts = list[list[int]]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
HOST = {"host_memory_bytes": 8 << 20}


def _texts(engine: Engine, prompts: Texts) -> Texts:
    return [told.token_ids for told in run_all(engine, prompts, GREEDY)]


@pytest.fixture(scope="module")
def checkpoints(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By device: GPU kernels serve quantised caches from head_dim 64 on."""
    return {"cpu": tiny_llama, "cuda": make_tiny_llama(tmp_path_factory.mktemp("tiny_llama_64"), head_dim=64)}


def _small(checkpoint: Path, device: str, in_fp32: bool = False, **cache: object) -> Engine:
    """Room for one of the long prompts and its output, hardly more. in_fp32: as a CPU computes anyway."""
    dtype = "float32" if device == "cpu" or in_fp32 else "bfloat16"
    sizes = {"num_blocks": 20} if device == "cpu" else {"num_blocks": 7, "block_size": 32}
    model = {"device": device, "dtype": dtype, "max_model_len": 128}
    return make_engine(checkpoint, model=model, cache={**sizes, **cache})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_type", ["auto", "fp8_e4m3", "int8", "int4"])
def test_cold_prefixes_come_back(checkpoints: dict[str, Path], prompts: Texts, device: str, kv_type: str) -> None:
    """The text is that of a prefix found in the pool, which a GPU computes in the same shapes."""
    long = prompts[-4:]
    roomy = _small(checkpoints[device], device, dtype=kv_type, num_blocks=200)
    expected = [[_texts(roomy, [prompt])[0] for prompt in long] for _ in range(2)][1]
    engine = _small(checkpoints[device], device, dtype=kv_type, **HOST)
    for prompt in long:
        _texts(engine, [prompt])  # each pushes the one before out
    host = engine.scheduler.cache.host
    assert host is not None and host.num_stored > 0
    loaded, hits = host.num_loaded, engine.scheduler.cache.num_prefix_hits
    assert [_texts(engine, [prompt])[0] for prompt in long] == expected
    assert host.num_loaded > loaded
    size = engine.config.cache.block_size
    assert engine.scheduler.cache.num_prefix_hits - hits >= sum((len(prompt) - 1) // size * size for prompt in long)


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_requests_come_back(tiny_llama: Path, prompts: Texts, device: str) -> None:
    """In fp32: a request alone and one among others are steps of other shapes, which bf16 rounds otherwise."""
    expected = [_texts(_small(tiny_llama, device, in_fp32=True), [prompt])[0] for prompt in prompts[6:]]
    engine = _small(tiny_llama, device, in_fp32=True, **HOST)
    told = run_all(engine, prompts[6:], GREEDY)
    assert [one.token_ids for one in told] == expected
    host = engine.scheduler.cache.host
    assert host is not None and host.num_loaded > 0
    host.check()


def test_a_host_of_few_blocks_still_gives_the_right_text(tiny_llama: Path, prompts: Texts) -> None:
    plain = [_texts(_small(tiny_llama, "cpu"), [prompt])[0] for prompt in prompts]
    engine = _small(tiny_llama, "cpu")
    engine = _small(tiny_llama, "cpu", host_memory_bytes=5 * engine.memory_plan.block_bytes)
    assert engine.memory_plan.num_host_blocks == 5 and "5 blocks" in str(engine.memory_plan)
    for _ in range(2):
        assert _texts(engine, prompts) == plain


def test_metrics(tiny_llama: Path, prompts: Texts) -> None:
    engine = _small(tiny_llama, "cpu", **HOST)
    for _ in range(2):
        _texts(engine, prompts)
    engine.stats.drain()
    engine.stats.publish()  # what the slot could not take before
    values = dict(engine.stats.drain())
    host = engine.scheduler.cache.host
    assert host is not None
    assert values[Metric.KV_BLOCKS_STORED] == [host.num_stored] and values[Metric.KV_BLOCKS_LOADED] == [host.num_loaded]
    assert values[Metric.KV_HOST_BLOCKS_TOTAL] == [engine.memory_plan.num_host_blocks]
    assert METRICS[Metric.KV_HOST_BLOCKS_USED].family == "slipstream_kv_host_blocks_used"


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        ({"host_memory_bytes": 1}, "from one block"),
        ({"host_memory_bytes": 1 << 50}, "what this host has free"),
        ({**HOST, "enable_prefix_caching": False}, "enable_prefix_caching is off"),
    ],
)
def test_what_cannot_be_is_refused(tiny_llama: Path, cache: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_host_memory_bytes.*{reason}"):
        _small(tiny_llama, "cpu", **cache)


def test_what_goes_to_the_host_is_not_written_before(tiny_llama: Path, prompts: Texts, tmp_path: Path) -> None:
    """Blocks for drafts are taken from cached ones behind a step's copies, and a verification launched ahead writes
    into them: what it has overwritten must not be kept as the old text."""
    params, dice = replace(GREEDY, max_tokens=250), random.Random(5)
    texts = [[dice.randrange(3, 260) for _ in range(dice.randrange(20, 90))] for _ in range(6)]
    said = [told.token_ids for told in run_all(make_engine(tiny_llama), texts, params)]
    engine = make_engine(
        tiny_llama,
        {"max_model_len": 400},
        {"num_blocks": 30, "block_size": 16, **HOST},
        {"overlap_scheduling": "on", "max_num_seqs": 1},
        speculation("mtp", tiny_llama, tmp_path / "mtp"),
    )
    Prompter({handle: text + output for handle, (text, output) in enumerate(zip(texts, said))}).attend(engine)
    assert [told.token_ids for told in run_all(engine, texts, params)] == said
    following = [text + output[:230] for text, output in zip(texts, said)]
    expected = run_all(make_engine(tiny_llama), following, replace(GREEDY, max_tokens=20, logprobs=0))
    for text, wanted in zip(following, expected):
        [told] = run_all(engine, [text], replace(GREEDY, max_tokens=20, logprobs=0, num_draft_tokens=0))
        assert told.logprobs[0].logprob == pytest.approx(wanted.logprobs[0].logprob, abs=1e-4)
        assert told.token_ids == wanted.token_ids
    assert engine.scheduler.cache.host is not None and engine.scheduler.cache.host.num_loaded > 0
