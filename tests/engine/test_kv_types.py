"""Every type of KV cache through the engine: what must not change the text does not, and what each type costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, announce, make_engine, model_worker, run_all, run_requests
from slipstream.core.config_parse import config_from_values
from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.engine.engine import Engine
from slipstream.nn.kv_types import resolve_kv_dtype
from speculation_config import speculation_config
from tiny_heads import make_eagle, make_mtp
from tiny_model import make_tiny_llama

Texts = list[list[int]]
KV_TYPES = ["fp8_e4m3", "int8", "int4"]


def _texts(engine: Engine, prompts: Texts) -> Texts:
    return [told.token_ids for told in run_all(engine, prompts, GREEDY)]


@pytest.fixture(scope="module", params=KV_TYPES)
def kv_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(kv_type: str, tiny_llama: Path, prompts: Texts) -> Texts:
    """One prompt at a time, whole, from an empty cache."""
    engine = make_engine(tiny_llama, cache={"dtype": kv_type, "enable_prefix_caching": False})
    return [_texts(engine, [prompt])[0] for prompt in prompts]


def test_the_type_is_used(kv_type: str, expected: Texts, engine: Engine, prompts: Texts) -> None:
    """A random model's near ties turn over: were all texts those of the float cache, nothing would be quantised."""
    assert expected != _texts(engine, prompts)


def test_batch_and_prefix_hit_are_single(kv_type: str, tiny_llama: Path, prompts: Texts, expected: Texts) -> None:
    engine = make_engine(tiny_llama, cache={"dtype": kv_type})
    assert _texts(engine, prompts) == expected
    hits = engine.scheduler.cache.num_prefix_hits
    assert _texts(engine, prompts) == expected
    assert engine.scheduler.cache.num_prefix_hits > hits


def test_chunked_is_whole(kv_type: str, tiny_llama: Path, prompts: Texts, expected: Texts) -> None:
    engine = make_engine(tiny_llama, cache={"dtype": kv_type}, scheduler={"max_num_batched_tokens": 21})
    assert _texts(engine, prompts) == expected


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_head_drafts_behind_one_token(kv_type: str, tiny_llama: Path, tmp_path: Path, method: str) -> None:
    """Its first pass then has one row, for which a CPU has an attention of its own."""
    make, field = {"eagle": (make_eagle, "eagle_head"), "mtp": (make_mtp, "mtp_module")}[method]
    speculation = speculation_config(method, **{field: str(make(tiny_llama, tmp_path / "head"))})
    drafting = make_engine(tiny_llama, cache={"dtype": kv_type}, speculation=speculation)
    assert _texts(drafting, [[5]]) == _texts(make_engine(tiny_llama, cache={"dtype": kv_type}), [[5]])


def test_preempted_is_not(kv_type: str, tiny_llama: Path, prompts: Texts, expected: Texts) -> None:
    cache = {"dtype": kv_type, "num_blocks": 20}
    engine = make_engine(tiny_llama, model={"max_model_len": 128}, cache=cache)
    requests = run_requests(engine, prompts, GREEDY)
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_preemptions for request in requests) > 0


def test_bytes_per_token(tiny_llama: Path) -> None:
    """Scales included: 4 bytes a head and token for int8 and int4, none for fp8."""
    spec = make_engine(tiny_llama).spec
    attention = spec.layers[0].attention
    heads, head_dim = 2 * spec.num_layers * attention.num_kv_heads, attention.head_dim
    expected = {"fp8_e4m3": head_dim, "int8": head_dim + 4, "int4": head_dim // 2 + 4}
    for kv_type, num_bytes in expected.items():
        plan = make_engine(tiny_llama, cache={"dtype": kv_type}).memory_plan
        assert plan.block_bytes == 8 * heads * num_bytes
    assert spec.kv_bytes_per_token(torch.float16) == heads * head_dim * 2


def test_refusals_name_what_is_accepted(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8_e5m2': accepted: auto or float32, .* int8, int4"):
        make_engine(tiny_llama, cache={"dtype": "fp8_e5m2"})
    spec = make_engine(tiny_llama).spec
    odd = spec.map_attention(lambda own: replace(own, head_dim=33))
    even = spec.map_attention(lambda own: replace(own, head_dim=64))
    cpu, cuda, float32 = torch.device("cpu"), torch.device("cuda"), torch.float32
    assert resolve_kv_dtype("int8", odd, cpu, float32, 16) == torch.int8
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int4': two values share a byte, head_dim 33 is odd"):
        resolve_kv_dtype("int4", odd, cpu, float32, 16)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8': .*head_dim 33 .*accepted: auto or float32"):
        resolve_kv_dtype("int8", odd, cuda, float32, 16)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8': .*blocks of 8 .*>= 16"):
        resolve_kv_dtype("int8", even, cuda, float32, 8)
    assert resolve_kv_dtype("int8", even, cuda, float32, 16) == torch.int8
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int4': .*blocks of 16 .*>= 32"):
        resolve_kv_dtype("int4", even, cuda, float32, 16)


@pytest.mark.parametrize(("word", "meant"), [("fp8", "fp8_e4m3"), ("FP8", "fp8_e4m3"), ("INT8", "int8")])
def test_other_backends_words(word: str, meant: str) -> None:
    for name in ("kv_cache_dtype", "kv_cache_quant_algo"):
        assert config_from_values({"model": "/somewhere", name: word}).cache.dtype == meant
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp7': accepted: auto, .*fp8_e4m3, int8, int4"):
        config_from_values({"model": "/somewhere", "kv_cache_dtype": "fp7"})


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which GPU kernels serve."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama_64"), head_dim=64)


@needs_cuda
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_graph_is_eager_and_gpu_near_cpu(kv_type: str, wide_heads: Path, prompts: Texts) -> None:
    """fp32 weights. A rounding that lies on the border may turn a text, so first tokens are held against the CPU's."""
    cache = {"dtype": kv_type, "block_size": 32}
    eager, graphs = (
        make_engine(wide_heads, {"device": "cuda", "dtype": "float32", "cuda_graphs": mode}, cache)
        for mode in ("off", "1,4,16")
    )
    texts = _texts(eager, prompts)
    assert _texts(graphs, prompts) == texts
    on_cpu = _texts(make_engine(wide_heads, cache=cache), prompts)
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(texts, on_cpu)) >= len(prompts) - 1


@needs_cuda
@pytest.mark.parametrize("kv_type", ["auto", *KV_TYPES])
def test_decode_rows_beside_a_prompt_are_as_alone(kv_type: str, wide_heads: Path) -> None:
    """bf16, the split-KV kernel for the decodes and the prefill kernel for the chunk, in one step and apart."""
    model = {"device": "cuda", "dtype": "bfloat16", "cuda_graphs": "off"}
    unpaced = {"overlap_scheduling": "off", "max_mixed_step_ms": 1_000_000}  # the first steps load kernels
    engine = make_engine(wide_heads, model, {"dtype": kv_type, "block_size": 32}, unpaced)
    for index in range(5):
        engine.submit(Request([5 + index] * (9 + 20 * index), GREEDY))
    for _ in range(3):
        engine.step()
    engine.scheduler.add(Request([7, 8, 9] * 60, GREEDY))
    runner, step = model_worker(engine).runner, engine.scheduler.schedule()
    assert step.num_scheduled_tokens == [1] * 5 + [180]
    with torch.inference_mode():
        inputs = runner.build(*announce(engine, step))
        assert inputs.batch.num_decode_requests == 5
        mixed = runner.forward(inputs).clone()
        rows = (slice(0, 5), slice(5, None))
        for part, chosen in zip(rows, (step.rows[:5], step.rows[5:])):
            alone = runner.forward(runner.build(*announce(engine, ScheduledStep.of(chosen))))
            # products of other shapes round otherwise, which moves a stored value by a step
            assert (mixed[part] - alone).norm() < (0.1 if kv_type == "int4" else 0.03) * alone.norm()
