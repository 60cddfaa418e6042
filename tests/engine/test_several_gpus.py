"""Ranks and stages on several GPUs, over NCCL and symmetric memory, say what one GPU says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, run_all
from slipstream.core.config import ParallelConfig
from tiny_model import make_tiny_llama

CUTS = {
    "two ranks": ParallelConfig(tensor_parallel_size=2),
    "two stages": ParallelConfig(pipeline_parallel_size=2),
    "four ranks": ParallelConfig(tensor_parallel_size=4),
    "two stages of two ranks": ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
}


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs several GPUs")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": "off"}, {"quantization": "fp8"}])
def test_several_gpus(options: dict[str, object], cut: str, tmp_path: Path) -> None:
    """In bf16 sums of several round otherwise than one, so the first tokens' log-probabilities are compared; several
    GPUs repeat themselves."""
    if torch.cuda.device_count() < CUTS[cut].num_ranks:
        pytest.skip(f"needs {CUTS[cut].num_ranks} GPUs")
    model = make_tiny_llama(tmp_path, head_dim=64, num_layers=4, hidden_size=256)
    texts = [[(7 * place + 3 * step) % 300 + 20 for step in range(5 + 37 * place)] for place in range(6)]
    params = replace(GREEDY, logprobs=1)
    on_gpu = {"device": "cuda:0", "dtype": "bfloat16", **options}
    told = []
    for parallel in (ParallelConfig(), CUTS[cut]):
        cache = {"block_size": 64, "num_blocks": 128, "enable_prefix_caching": False}  # a hit computes other rows
        engine = make_engine(model, on_gpu, cache, parallel=parallel)
        told.append([run_all(engine, texts, params) for _ in range(2)])
        engine.close()
    (alone, _), (once, again) = told
    assert [found.token_ids for found in once] == [found.token_ids for found in again]
    most = 0.5 if "quantization" in options else 0.1
    assert all(abs(a.logprobs[0].logprob - b.logprobs[0].logprob) < most for a, b in zip(alone, once))
