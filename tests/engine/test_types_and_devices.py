"""Other types and devices than float32 on a CPU: the engine runs, and in float32 a GPU says what the CPU says."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, model_worker, run_all
from exact_float32 import exact_float32
from safetensors.torch import load_file, save_file
from slipstream.core.errors import ConfigError
from slipstream.core.sampling_params import Guide
from slipstream.engine.engine import Engine

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_bfloat16_weights_and_cache(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(tiny_llama, model={"dtype": "bfloat16"})
    first = run_all(engine, prompts[:4], GREEDY)
    assert [told.token_ids for told in first] == [told.token_ids for told in run_all(engine, prompts[:4], GREEDY)]
    assert engine.memory_plan.block_bytes == 8 * engine.spec.kv_bytes_per_token(torch.bfloat16)


def test_dummy_weights(tiny_llama: Path, prompts: list[list[int]]) -> None:
    texts = [
        [told.token_ids for told in run_all(make_engine(tiny_llama, model=model), prompts[:3], GREEDY)]
        for model in ({"load_format": "dummy", "seed": 1}, {"load_format": "dummy", "seed": 1}, {"load_format": "auto"})
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_attention_of_a_cpu(tiny_llama: Path, prompts: list[list[int]], kv_dtype: str) -> None:
    """Decodes have a backend of their own where keys have the model's type; the tokens are those of `paged`."""
    engines = [
        make_engine(tiny_llama, model={"attention_backend": name}, cache={"dtype": kv_dtype}) for name in ("", "paged")
    ]
    runner = model_worker(engines[0]).runner
    assert type(runner.model.backend).__name__ == ("CpuAttention" if kv_dtype == "auto" else "PagedAttention")
    texts = [[told.token_ids for told in run_all(engine, prompts[:4], GREEDY)] for engine in engines]
    assert texts[0] == texts[1]


def test_threads_of_a_cpu(tiny_llama: Path) -> None:
    before, num_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    try:
        for asked in (3, 1):
            make_engine(tiny_llama, model={"num_threads": asked})
            assert torch.get_num_threads() == asked
        torch.set_num_threads(num_cores)
        make_engine(tiny_llama)
        assert torch.get_num_threads() == max(1, num_cores - 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_afterwards_what_it_was(before: bool) -> None:
    """Also where no GPU is: the fixture no_tf32 must be able to undo what it does."""
    matmul = torch.backends.cuda.matmul
    original, matmul.allow_tf32 = matmul.allow_tf32, before
    with exact_float32():
        assert not matmul.allow_tf32
    assert matmul.allow_tf32 == before
    matmul.allow_tf32 = original


@needs_cuda
@pytest.mark.usefixtures("no_tf32")
def test_gpu_is_cpu_in_float32(tiny_llama: Path, engine: Engine, prompts: list[list[int]]) -> None:
    pytest.importorskip("xgrammar", exc_type=ImportError)
    on_gpu = make_engine(tiny_llama, model={"device": "cuda", "dtype": "float32"})
    params = [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.3, logit_bias=((9, 3.0),), min_tokens=5, logprobs=2),
        replace(GREEDY, bad_words_ids=((4, 5), (7,)), prompt_logprobs=1),
        replace(GREEDY, guide=Guide("regex", "[a-z]{10}")),
    ] * 3
    expected = [told.token_ids for told in run_all(engine, prompts, params)]
    assert [told.token_ids for told in run_all(on_gpu, prompts, params)] == expected


@needs_cuda
def test_gpu_sampling_repeats(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(tiny_llama, model={"device": "cuda"})
    params = [replace(GREEDY, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=i) for i in range(len(prompts))]
    first = [told.token_ids for told in run_all(engine, prompts, params)]
    assert [told.token_ids for told in run_all(engine, prompts, params)] == first


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_weights_that_are_no_numbers_fail_the_load_by_name(tiny_llama: Path, tmp_path: Path, device: str) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"NaN or infinity: tensor model\.layers\.1\.mlp\.down_proj\.weight of"):
        make_engine(folder, model={"device": device})
