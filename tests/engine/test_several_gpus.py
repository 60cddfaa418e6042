"""Ranks and stages on several GPUs, over NCCL and symmetric memory, say what one GPU says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, run_all, run_twice
from nodes import Node
from own_process import in_own_process
from slipstream.core.config import ParallelConfig, SpeculationConfig
from slipstream.core.request import FinishReason
from slipstream.core.sampling_params import Guide, SamplingParams
from speculation_config import speculation_config
from tiny_checkpoints import make_checkpoint
from tiny_heads import make_eagle, make_medusa, make_mtp
from tiny_model import make_tiny_llama, save_tokenizer

CUTS = {
    "two ranks": ParallelConfig(tensor_parallel_size=2),
    "two stages": ParallelConfig(pipeline_parallel_size=2),
    "four ranks": ParallelConfig(tensor_parallel_size=4),
    "two stages of two ranks": ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
}


IN_FP32 = {"dtype": "float32"}
CACHE = {"block_size": 64, "num_blocks": 128, "enable_prefix_caching": False}  # a hit computes other rows
TEXTS = [[(7 * place + 3 * step) % 300 + 20 for step in range(5 + 37 * place)] for place in range(6)]
METHODS = ("ngram", "draft_model", "medusa", "mtp", "eagle")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs several GPUs"
)


def make_model(folder: Path) -> Path:
    return make_tiny_llama(folder, head_dim=64, num_layers=4, hidden_size=256)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "options",
    [IN_FP32, {**IN_FP32, "cuda_graphs": "off"}, {}, {"quantization": "fp8"}],
    ids=["fp32", "eager", "", "fp8"],
)
def test_several_gpus(options: dict[str, object], cut: str, tmp_path: Path) -> None:
    """In fp32 what one GPU says, to a near tie. In bf16 this model's log-probabilities differ by 0.6 where sums are
    rounded otherwise: there first tokens are those of one GPU, not all, and several GPUs repeat themselves."""
    if torch.cuda.device_count() < CUTS[cut].num_ranks:
        pytest.skip(f"needs {CUTS[cut].num_ranks} GPUs")
    model, params = make_model(tmp_path), replace(GREEDY, logprobs=1)
    on_gpu = {"device": "cuda:0", "dtype": "bfloat16", **options}
    once, again = in_own_process(run_twice, model, on_gpu, CACHE, CUTS[cut], TEXTS, params)
    assert [found.token_ids for found in once] == [found.token_ids for found in again]
    assert all(len(found.token_ids) == GREEDY.max_tokens for found in once)
    alone = run_all(make_engine(model, on_gpu, CACHE), TEXTS, params)
    if on_gpu["dtype"] == "float32":
        for one, several in zip(alone, once):
            assert_same_to_a_near_tie(one, several)
    else:  # of the six first tokens five and two are the same on a CPU
        num_same = sum(one.token_ids[0] == several.token_ids[0] for one, several in zip(alone, once))
        assert num_same >= (1 if "quantization" in options else 3)


@pytest.mark.parametrize("cut", ["two ranks", "two stages"])
def test_every_way_to_draft(cut: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    heads = {
        "draft_model": str(model),
        "medusa_heads": str(make_medusa(model, tmp_path / "medusa")),
        "mtp_module": str(make_mtp(model, tmp_path / "mtp")),
        "eagle_head": str(make_eagle(model, tmp_path / "eagle")),
    }
    speculation = speculation_config(",".join(METHODS), throttle="off", ngram_min=1, **heads)
    plain = replace(GREEDY, logprobs=1)
    params = [replace(plain, speculative_method=method) for method in METHODS]
    once = same_as_alone(model, CUTS[cut], params, [plain] * len(METHODS), speculation)
    assert all(len(found.token_ids) == GREEDY.max_tokens for found in once)


@pytest.mark.parametrize("cut", ["two ranks", "two stages"])
def test_a_grammar(cut: str, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    params = [replace(GREEDY, logprobs=1, ignore_eos=False, guide=Guide("regex", "[a-z]{12}"))] * 2
    once = same_as_alone(make_model(tmp_path), CUTS[cut], params)
    assert {found.finish_reason for found in once} == {FinishReason.STOP}, "the grammar ends the text"


@pytest.mark.parametrize("by_experts", [False, True], ids=["parts", "experts"])
def test_experts_over_ranks(by_experts: bool, tmp_path: Path) -> None:
    """Each rank has a part of every expert, or whole experts."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "moe_intermediate_size": 128}
    make_checkpoint("qwen3-moe", tmp_path, vocab_size=400, max_position_embeddings=512, **sizes)
    save_tokenizer(tmp_path)
    same_as_alone(tmp_path, replace(CUTS["two ranks"], expert_parallel=by_experts))


def test_graphs_that_call_nccl_end_with_their_model(tmp_path: Path) -> None:
    """In deterministic mode ranks gather, by NCCL, and sum in a fixed order; NCCL waits for graphs that call it."""
    same_as_alone(make_model(tmp_path), CUTS["two ranks"], deterministic=True)


@pytest.mark.parametrize("cut", ["two ranks", "two stages"])
def test_a_second_node(cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with the second GPU; NCCL goes over sockets, as between machines."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "1")
    with monkeypatch.context() as of_worker:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        of_worker.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
        node = Node(tmp_path, b"a secret of two machines")
    with node:
        nodes = replace(CUTS[cut], num_nodes=2, rank_address=node.address, rank_secret_file=str(node.secret))
        same_as_alone(make_model(tmp_path / "model"), nodes)


def same_as_alone(
    model: Path,
    cut: ParallelConfig,
    params: list[SamplingParams] | None = None,
    alone: list[SamplingParams] | None = None,
    speculation: SpeculationConfig | None = None,
    **options: object,
) -> list[Told]:
    """Assert that several GPUs repeat themselves and say in fp32 what one says. params: by default greedy ones; alone:
    of one GPU, by default the same."""
    params = params or [replace(GREEDY, logprobs=1)] * len(TEXTS)
    texts, on_gpu = TEXTS[: len(params)], {"device": "cuda:0", **IN_FP32, **options}
    once, again = in_own_process(run_twice, model, on_gpu, CACHE, cut, texts, params, speculation)
    assert [found.token_ids for found in once] == [found.token_ids for found in again]
    for one, several in zip(run_all(make_engine(model, on_gpu, CACHE), texts, alone or params), once):
        assert_same_to_a_near_tie(one, several)
    return once


def assert_same_to_a_near_tie(one: Told, other: Told) -> None:
    for place, (token, its) in enumerate(zip(one.token_ids, other.token_ids)):
        assert abs(one.logprobs[place].logprob - other.logprobs[place].logprob) < 0.02, place
        if token != its:
            return
