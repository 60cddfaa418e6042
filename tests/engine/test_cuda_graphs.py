"""Decode steps replayed from CUDA graphs say what eager steps say, padded or not, overlapped or not; sizes as data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, run_all
from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.runtime.cuda_graphs import DEFAULT_SIZES, DecodeGraphs, graph_sizes
from slipstream.runtime.engine import Engine
from tiny_model import make_tiny_llama

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IN_FP32 = {"device": "cuda", "dtype": "float32"}
BLOCKS_OF_16 = {"block_size": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which attention kernels serve."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama_64"), head_dim=64)


def test_sizes() -> None:
    assert graph_sizes("auto", 256, CPU) == graph_sizes("off", 256, CUDA) == ()
    assert graph_sizes("auto", 40, CUDA) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert graph_sizes("auto", 100_000, CUDA) == DEFAULT_SIZES
    assert graph_sizes("8, 1,4", 256, CUDA) == (1, 4, 8)


def test_what_cannot_be_captured_runs_without_or_is_refused() -> None:
    assert graph_sizes("auto", 256, CUDA, "it reads the host") == ()
    with pytest.raises(ConfigError, match=r"cuda_graphs='1,2'.*it reads the host"):
        graph_sizes("1,2", 256, CUDA, "it reads the host")


def test_a_step_takes_the_next_larger_size() -> None:
    graphs = DecodeGraphs((1, 4, 8), 16, 100, lambda batch: batch.token_ids, CPU)
    assert [graphs.size_for(count, count) for count in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert graphs.size_for(2, 5) is None
    assert DecodeGraphs((), 16, 100, lambda batch: batch.token_ids, CPU).size_for(1, 1) is None


def _texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = [
        replace(GREEDY, max_tokens=40),
        replace(GREEDY, temperature=0.8, top_p=0.9, seed=3),
        replace(GREEDY, repetition_penalty=1.3, max_tokens=7),
        replace(GREEDY, logprobs=2, max_tokens=11),
    ] * 3
    return [told.token_ids for told in run_all(engine, prompts, params)]


@needs_cuda
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_graph_is_eager(checkpoint: Path, prompts: list[list[int]], overlap: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    eager = make_engine(checkpoint, {**IN_FP32, "cuda_graphs": "off"}, BLOCKS_OF_16, {"overlap_scheduling": "off"})
    graphs = make_engine(checkpoint, {**IN_FP32, "cuda_graphs": "1,3,8"}, BLOCKS_OF_16, {"overlap_scheduling": overlap})
    assert eager._num_ahead == 0 and graphs._num_ahead == (overlap == "on")
    expected = _texts(eager, prompts)
    assert _texts(graphs, prompts) == expected
    assert [_texts(graphs, prompts[:n]) for n in (1, 2)] == [_texts(eager, prompts[:n]) for n in (1, 2)]


@needs_cuda
def test_hidden_states_of_a_padded_graph_are_those_of_its_eager_step(checkpoint: Path) -> None:
    """bf16, five requests in a graph of eight: bit for bit what the same kernels give on the same padded tensors."""
    engine = make_engine(
        checkpoint,
        {"device": "cuda", "dtype": "bfloat16", "cuda_graphs": "8"},
        BLOCKS_OF_16,
        {"overlap_scheduling": "off"},
    )
    for index in range(5):
        engine.submit(Request([5 + index] * (9 + 20 * index), GREEDY))
    for _ in range(4):
        engine.step()
    runner = engine._runner
    step = engine.scheduler.schedule()
    with torch.inference_mode():
        inputs = runner.build(step)
        assert inputs.graph_size == 8
        replayed = runner.forward(inputs)[:5].clone()
        eager = runner._run_model(inputs.batch)[:5]  # writes the same keys and values once more
    assert torch.equal(replayed, eager) and torch.isfinite(eager).all()
    assert inputs.batch.seq_lens.tolist()[5:] == [0, 0, 0] and inputs.batch.slot_mapping.tolist()[5:] == [-1, -1, -1]


@needs_cuda
def test_defaults_on_a_gpu(checkpoint: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(checkpoint, {"device": "cuda", "dtype": "bfloat16"}, BLOCKS_OF_16)
    assert engine._num_ahead == 1 and set(engine._runner._graphs._graphs) == {1, 2, 4, 8, 16, 24, 32, 48, 64}
    assert {"plan", "weights", "KV pool", "warm-up", "graphs"} <= set(engine.start_up.seconds)
    first = _texts(engine, prompts)
    assert _texts(engine, prompts) == first
