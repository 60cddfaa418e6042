"""Deterministic mode with experts and latent attention: tokens and log-probabilities to the bit, whatever runs beside.

On a GPU in bf16. Without one in float32, with the mode's ops computed row by row (row_by_row.py): bits then say that
nothing else in the engine makes a row depend on others.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import make_engine, model_worker, run_all
from in_company import each_alone, together
from rehearsed_graphs import num_replays, rehearse_graphs
from row_by_row import compute_row_by_row
from slipstream.core.config import ParallelConfig
from slipstream.core.errors import ConfigError
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from speculation_config import speculation_config
from tiny_checkpoints import make_checkpoint
from tiny_heads import make_medusa
from tiny_latent_mtp import add_mtp
from tiny_model import save_tokenizer
from tiny_variants import EXPERTS_OF_GPUS, LATENT_OF_GPUS, SIZES_OF_GPUS

HAS_GPU = torch.cuda.is_available()
# Name -> checkpoint and its sizes. Weights of a token's experts are shares of these, or of all.
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("mixtral", {"head_dim": 64, "num_local_experts": 32, "intermediate_size": 32}),
    "qwen3-moe": ("qwen3-moe", {**EXPERTS_OF_GPUS, "norm_topk_prob": False}),
    "deepseek-v2": ("deepseek-v2", LATENT_OF_GPUS),
    "deepseek-v3": ("deepseek-v3", LATENT_OF_GPUS),
}
LENGTHS = (5, 48, 70, 33, 12, 91)  # of prompts, the first of which is the beginning of the second
WANTED = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.9, seed=6, top_k=40, ignore_eos=True, logprobs=2),
] * 2


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        compute_row_by_row(monkeypatch)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (variant, sizes) in FAMILIES.items():
        made[name] = make_checkpoint(variant, tmp_path_factory.mktemp(name), **{**SIZES_OF_GPUS, **sizes}).path
        save_tokenizer(made[name])
    return made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    dice = random.Random(4)
    drawn = [[dice.randrange(3, 97) for _ in range(length)] for length in LENGTHS]
    drawn[0] = drawn[1][: LENGTHS[0]]
    return drawn


def deterministic(checkpoint: Path, **sections: dict[str, object]) -> Engine:
    place = {"device": "cuda", "dtype": "bfloat16"} if HAS_GPU else {}
    speculation = sections.get("speculation")
    return make_engine(
        checkpoint,
        model={"deterministic": True, **place, **sections.get("model", {})},
        cache={"block_size": 16, "num_blocks": 64, **sections.get("cache", {})},
        scheduler=sections.get("scheduler"),
        speculation=speculation_config(throttle="off", **speculation) if speculation else None,  # type: ignore[arg-type]
    )


COMPANY: dict[str, dict[str, dict[str, object]]] = {
    "whole prompts": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 23}},
    "preempted": {"cache": {"num_blocks": 14}},
    "ngram": {"speculation": {"methods": "ngram"}},
    "graphs": {"model": {"cuda_graphs": "2,4,8"}},  # last: a CPU rehearses them from here on
}


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_nothing(
    checkpoints: dict[str, Path], prompts: list[list[int]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, the second time behind cached beginnings."""
    checkpoint = checkpoints[family]
    eager = {"model": {"cuda_graphs": "off"}, "cache": {"enable_prefix_caching": False}}
    alone = each_alone(deterministic(checkpoint, **eager), prompts, WANTED)
    for name, sections in COMPANY.items():
        if name == "graphs" and not HAS_GPU:
            rehearse_graphs(monkeypatch, (2, 4, 8))
        engine = deterministic(checkpoint, **sections)
        for _ in range(2):
            found, requests = together(engine, prompts, WANTED, 5)
            assert found == alone, name
            assert any(request.num_preemptions for request in requests) is (name == "preempted")
        assert name == "preempted" or engine.scheduler.cache.num_prefix_hits > 0, name
        assert name != "graphs" or HAS_GPU or num_replays(model_worker(engine).runner._graphs) > 0


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_trees_and_modules_that_draft_change_nothing(
    checkpoints: dict[str, Path], prompts: list[list[int]], family: str, tmp_path: Path
) -> None:
    """Medusa's trees; of DeepSeek-V3 also chains of the checkpoint's own module, in FP8 rows too."""
    model = tmp_path / "model"
    shutil.copytree(checkpoints[family], model)
    medusa = {"methods": "medusa", "medusa_heads": str(make_medusa(model, tmp_path / "heads"))}
    cases: list[tuple[dict[str, object], dict[str, object]]] = [({}, medusa)]
    if family == "deepseek-v3":
        add_mtp(model)
        mtp = {"methods": "mtp", "num_draft_tokens": 3}
        cases += [({}, mtp), ({"dtype": "fp8_e4m3"}, mtp), ({"dtype": "fp8_e4m3"}, medusa)]
    for cache, speculation in cases:
        alone = each_alone(deterministic(model, cache=cache), prompts, WANTED)
        engine = deterministic(model, cache=cache, speculation=speculation)
        found, requests = together(engine, prompts, WANTED, 5)
        assert found == alone
        assert sum(request.num_drafted_tokens for request in requests) > 0


@pytest.mark.skipif(HAS_GPU, reason="ranks are processes on the CPU, whose sums in float32 are compared")
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_share_experts_and_heads(
    checkpoints: dict[str, Path], prompts: list[list[int]], expert_parallel: bool
) -> None:
    parallel, texts = ParallelConfig(tensor_parallel_size=2, expert_parallel=expert_parallel), []
    greedy = replace(WANTED[0], logprobs=None)
    for own in (ParallelConfig(), parallel):
        scheduler = {"max_num_batched_tokens": 24}
        engine = make_engine(checkpoints["deepseek-v3"], {"deterministic": True}, {}, scheduler, parallel=own)
        texts.append([told.token_ids for told in run_all(engine, prompts[:3], greedy)])
        engine.close()
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("quantization", ["fp8", "wint8"])
def test_so_it_is_with_other_weights(checkpoints: dict[str, Path], prompts: list[list[int]], quantization: str) -> None:
    checkpoint, types = checkpoints["mixtral"], {"quantization": quantization}
    alone = each_alone(deterministic(checkpoint, model=types), prompts, WANTED)
    assert together(deterministic(checkpoint, model=types), prompts, WANTED, 5)[0] == alone
    assert each_alone(deterministic(checkpoint), prompts[:1], WANTED) != alone[:1]


@pytest.mark.parametrize("quantization", ["wint4", "w4a8_fp8", "a8w8_fp8_wint4", "w8a8_int8"])
def test_formats_without_such_products_are_refused(checkpoints: dict[str, Path], quantization: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization='{quantization}': deterministic: {quantization} has no"):
        deterministic(checkpoints["mixtral"], model={"quantization": quantization})


def test_latent_attention_has_its_own_backend(checkpoints: dict[str, Path]) -> None:
    """And only it; "latent" takes its sums from what else is in the step."""
    for family, refused, accepted in (("deepseek-v3", "latent", "invariant_latent"), ("mixtral", "paged", "invariant")):
        with pytest.raises(ConfigError, match=f"deterministic: accepted: {accepted}, or empty"):
            deterministic(checkpoints[family], model={"attention_backend": refused})
        deterministic(checkpoints[family], model={"attention_backend": accepted})


def test_it_says_what_the_mode_without_it_says(checkpoints: dict[str, Path], prompts: list[list[int]]) -> None:
    """Nearly: of the first token, where both know the likeliest.

    A router's near tie may go the other way in bf16, which moves a random model's log-probabilities ten times as far:
    two prompts of six may be so."""
    for family, checkpoint in checkpoints.items():
        apart = []
        found = [
            each_alone(deterministic(checkpoint, model={"deterministic": mode}), prompts, WANTED)
            for mode in (True, False)
        ]
        for (_, (exact, *_)), (_, (fast, *_)) in zip(*found):
            common = dict(exact[1]).keys() & dict(fast[1]).keys()
            apart.append(max((abs(dict(exact[1])[token] - dict(fast[1])[token]) for token in common), default=1.0))
        assert sorted(apart)[3] < 0.1, (family, apart)
