"""Prompts whose chunks take several steps, some layers in each, say what prompts of whole chunks say."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, model_worker, run_all, run_steps
from rehearsed_graphs import num_replays, rehearse_graphs, rehearse_graphs_of_ranks
from slipstream.core.config import ParallelConfig
from slipstream.core.layered_prefill import LayeredPrefill
from slipstream.core.prefill_budget import PrefillBudget
from slipstream.core.request import FinishReason, Request
from slipstream.engine.engine import Engine
from slipstream.engine.executor import SerializedWorker, local_worker
from slipstream.worker.graph_shapes import LayerShape, layer_shapes
from slipstream.worker.host_copy import HostCopy
from slipstream.worker.interface import StepResult
from tiny_checkpoints import make_checkpoint
from tiny_heads import speculation
from tiny_model import make_tiny_llama, make_tiny_windowed, save_tokenizer
from tiny_variants import EXPERTS_OF_GPUS, LATENT_OF_GPUS, SIZES_OF_GPUS

Texts = list[list[int]]
LIMIT, PARITY = 40, 30.0  # 40 weighted tokens a step: of a chunk of 40 behind 60 others a third of the layers
LENGTHS = 7, 300, 230
TEXTS: Texts = [[(5 * step + 3 * place) % 90 + 5 for step in range(length)] for place, length in enumerate(LENGTHS)]


def layer_by_layer(engine: Engine) -> list[tuple[int, int]]:
    """Give the engine a bound that whole chunks pass soon. Returns a list of the layers that its steps will take."""
    engine.scheduler.prefill_budget = PrefillBudget(LIMIT, PARITY, layered=LayeredPrefill(engine.spec.num_layers))
    found: list[tuple[int, int]] = []
    execute = engine.worker.execute

    def counted(step: object) -> None:
        if step.layered is not None:  # type: ignore[attr-defined]
            found.append((step.layered.first_layer, step.layered.end_layer))  # type: ignore[attr-defined]
        execute(step)  # type: ignore[arg-type]

    engine.worker.execute = counted  # type: ignore[method-assign, assignment]
    return found


def replays(engine: Engine) -> list[int]:
    """A list of the layers that will be replayed from graphs."""
    graphs, found = model_worker(engine).runner.layered.graphs, []
    replay = graphs.replay

    def noted(shape: LayerShape) -> torch.Tensor:
        found.append(shape.layer)
        return replay(shape)

    graphs.replay = noted  # type: ignore[method-assign]
    return found


def run(engine: Engine, texts: Texts = TEXTS) -> list[Told]:
    """A stream first, then the others beside it."""
    params, told = replace(GREEDY, max_tokens=100), {}
    stream, *others = [Request(list(text), params if not place else GREEDY) for place, text in enumerate(texts)]
    engine.submit(stream)
    run_steps(engine, told, 3)
    for other in others:
        engine.submit(other)
    run_steps(engine, told)
    assert engine.scheduler.cache.num_used_blocks == 0 and engine.error is None
    return [told[request] for request in (stream, *others)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_layers=4)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_layered_is_whole(checkpoint: Path, overlap: str) -> None:
    options = {"scheduler": {"overlap_scheduling": overlap}}
    expected = run(make_engine(checkpoint, **options))
    engine = make_engine(checkpoint, **options, make_worker=lambda *args: SerializedWorker(local_worker(*args)))
    layers = layer_by_layer(engine)
    assert [told.token_ids for told in run(engine)] == [told.token_ids for told in expected]
    assert {end - first for first, end in layers} >= {1} and {first for first, _ in layers} >= {0, 1, 2, 3}
    assert [told.token_ids for told in run(engine)] == [told.token_ids for told in expected]  # behind cached prefixes


@pytest.mark.parametrize("variant", ["llama", "deepseek-v3", "qwen3-moe"])
def test_layers_in_graphs(variant: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As eager ones, with padding behind chunks; a chunk of one token fits no graph."""
    model = checkpoint
    if variant != "llama":
        model = make_checkpoint(variant, tmp_path, max_position_embeddings=512).path
        save_tokenizer(model)
    expected = run(make_engine(model))
    rehearse_graphs(monkeypatch, (1, 2, 4))
    engine = make_engine(model)
    layers, graphs = layer_by_layer(engine), model_worker(engine).runner.layered.graphs
    assert [told.token_ids for told in run(engine)] == [told.token_ids for told in expected]
    assert len(graphs.shapes) == engine.spec.num_layers
    assert num_replays(graphs) == sum(end - first for first, end in layers) > 0


def test_short_contexts_have_no_graphs_of_layers(checkpoint: Path) -> None:
    spec = make_engine(checkpoint).spec
    parity = int(spec.attention_parity)
    assert not layer_shapes((1, 2), spec, parity // 8) and not layer_shapes((), spec, 8 * parity)
    assert [shape.layer for shape in layer_shapes((1, 2), spec, 8 * parity)] == [0, 1, 2, 3]


@pytest.mark.parametrize("variant", ["deepseek-v3", "qwen3-moe", "windowed"])
def test_other_layouts(variant: str, tmp_path: Path) -> None:
    """Latent attention, experts; where layers see windows chunks are whole."""
    if variant == "windowed":
        model = make_tiny_windowed(tmp_path)
    else:
        model = make_checkpoint(variant, tmp_path, max_position_embeddings=512).path
        save_tokenizer(model)
    expected = run(make_engine(model))
    engine = make_engine(model)
    layers = layer_by_layer(engine)
    assert [told.token_ids for told in run(engine)] == [told.token_ids for told in expected]
    assert bool(layers) == (variant != "windowed")


def midway(engine: Engine, told: dict[Request, Told]) -> tuple[Request, Request]:
    """A stream and a prompt of which a chunk has gone through some layers."""
    layers = layer_by_layer(engine)
    params = replace(GREEDY, max_tokens=200)
    stream, prompt = (Request(list(text), params, handle=handle) for handle, text in enumerate(TEXTS[:2]))
    engine.submit(stream)
    run_steps(engine, told, 3)
    engine.submit(prompt)
    while not layers or layers[-1][1] == 4:
        run_steps(engine, told, 1)
    return stream, prompt


def test_a_preempted_prompt_begins_again(checkpoint: Path) -> None:
    expected = run_all(make_engine(checkpoint), TEXTS[:2], replace(GREEDY, max_tokens=200))
    engine, told = make_engine(checkpoint), {}
    requests = midway(engine, told)
    engine.scheduler._preempt(requests[1])
    run_steps(engine, told)
    assert requests[1].num_preemptions == 1
    assert [told[request].token_ids for request in requests] == [one.token_ids for one in expected]


def test_a_cancelled_prompt_leaves_nothing(checkpoint: Path) -> None:
    engine, told = make_engine(checkpoint), {}
    stream, prompt = midway(engine, told)
    engine.cancel(1)
    run_steps(engine, told)
    assert told[prompt].finish_reason is FinishReason.CANCELLED and len(told[stream].token_ids) == 200
    assert engine.scheduler.cache.num_used_blocks == 0
    expected = run(make_engine(checkpoint))
    assert [one.token_ids for one in run(engine)] == [one.token_ids for one in expected]


def test_two_ranks(checkpoint: Path) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2)
    expected = run(make_engine(checkpoint))
    engine = make_engine(checkpoint, {"dtype": "float32"}, parallel=parallel)
    try:
        layers = layer_by_layer(engine)
        assert [told.token_ids for told in run(engine)] == [told.token_ids for told in expected]
        assert layers
    finally:
        engine.close()


def test_two_ranks_in_graphs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks replay the same layers: a rank that ran one without its graph would make its sums alone."""
    expected = run(make_engine(checkpoint))
    rehearse_graphs_of_ranks(monkeypatch, (1, 2, 4))
    engine = make_engine(checkpoint, {"dtype": "float32"}, parallel=ParallelConfig(tensor_parallel_size=2))
    try:
        layers, graphs = layer_by_layer(engine), model_worker(engine).runner.layered.graphs
        assert [told.token_ids for told in run(engine)] == [told.token_ids for told in expected]
        assert num_replays(graphs) == sum(end - first for first, end in layers) > 0
    finally:
        engine.close()


@pytest.mark.parametrize(("method", "expected"), [("ngram", 4), ("draft_model", 0), ("medusa", 0), ("mtp", 0)])
def test_where_drafters_follow_prompts_it_is_off(checkpoint: Path, tmp_path: Path, method: str, expected: int) -> None:
    """An n-gram proposer reads the text alone."""
    engine = make_engine(checkpoint, speculation=speculation(method, checkpoint, tmp_path))
    assert engine.scheduler.prefill_budget._layered._num_layers == expected
    assert model_worker(engine).speculator.layout.follows_prompts is not bool(expected)


def test_two_stages_have_none(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, parallel=ParallelConfig(pipeline_parallel_size=2))
    try:
        assert engine.scheduler.prefill_budget._layered._num_layers == 0
    finally:
        engine.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("no_tf32")
def test_on_a_gpu(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path, head_dim=64, num_layers=4)
    on_gpu = {"device": "cuda", "dtype": "float32", "cuda_graphs": "1,2,4"}
    expected = run_all(make_engine(model, on_gpu, {"block_size": 16}), TEXTS, GREEDY)
    engine = make_engine(model, on_gpu, {"block_size": 16})
    layers, replayed = layer_by_layer(engine), replays(engine)
    found = run(engine)
    assert [one.token_ids[:24] for one in found] == [one.token_ids for one in expected]
    assert len(replayed) == sum(end - first for first, end in layers) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["qwen3-moe", "deepseek-v3"])
def test_other_layouts_on_a_gpu(variant: str, tmp_path: Path) -> None:
    """Deterministic, so that what a token says depends neither on its company nor on how prompts are cut."""
    sizes = EXPERTS_OF_GPUS if variant == "qwen3-moe" else LATENT_OF_GPUS
    model = make_checkpoint(variant, tmp_path, **{**SIZES_OF_GPUS, **sizes, "max_position_embeddings": 512}).path
    save_tokenizer(model)
    on_gpu, cache = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}, {"block_size": 16}
    expected = run(make_engine(model, {**on_gpu, "cuda_graphs": "off"}, cache))
    engine = make_engine(model, {**on_gpu, "cuda_graphs": "1,2,4"}, cache)
    layers, replayed = layer_by_layer(engine), replays(engine)
    for _ in range(2):
        assert [told.token_ids for told in run(engine)] == [told.token_ids for told in expected]
    assert len(replayed) == sum(end - first for first, end in layers) > 0


def test_steps_are_measured_by_the_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between two results that the worker reads reaches the pace of the steps."""
    monkeypatch.setattr(HostCopy, "seconds_since", lambda copy, other: 1e-6)
    engine = make_engine(checkpoint, scheduler={"max_mixed_step_ratio": 1.5})
    run_all(engine, [[5, 6, 7]], replace(GREEDY, max_tokens=8))
    pace = engine.scheduler.prefill_budget._pace
    assert pace is not None and list(pace._quiet) == [1e-6] * 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_device_measures_its_steps(tmp_path: Path, overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take as long as the host sees them all take, and none longer."""
    engine = make_engine(
        make_tiny_llama(tmp_path, head_dim=64),
        {"device": "cuda", "dtype": "bfloat16"},
        {"block_size": 16},
        {"overlap_scheduling": overlap},
    )
    measured: list[float | None] = []
    result = engine.worker.result

    def noted(step_id: int) -> StepResult:
        found = result(step_id)
        measured.append(found.device_s)
        return found

    monkeypatch.setattr(engine.worker, "result", noted)
    run_all(engine, [[5, 6, 7]], replace(GREEDY, max_tokens=4))
    del measured[:]
    start = time.perf_counter()
    run_all(engine, [[5, 6, 7]], replace(GREEDY, max_tokens=200))
    took = time.perf_counter() - start
    known = [seconds for seconds in measured[1:] if seconds is not None]
    assert len(known) == len(measured) - 1 >= 190
    assert min(known) > 0 and 0.5 * took < sum(known) <= took
