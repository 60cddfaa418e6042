"""What CUDA graphs keep on the device, as planned and as allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import make_engine, model_worker
from rehearsed_graphs import rehearse_graphs, rehearse_graphs_of_ranks
from slipstream.core.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from slipstream.nn.parallel import Parallel
from slipstream.nn.read_spec import read_spec
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.graph_memory import GraphMemory, graph_memory
from slipstream.worker.hardware import Hardware
from slipstream.worker.plan_memory import plan_memory
from slipstream.worker.workspace import workspace_bytes
from speculation_config import speculation_config
from tiny_checkpoints import make_checkpoint
from tiny_model import make_tiny_llama, save_tokenizer

GPU = Hardware(torch.device("cuda"), torch.float32, torch.float32)
GIB = 1 << 30
SIZES = (1, 2, 4)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path, num_layers=4)


def held_bytes(sets: Sequence[StepGraphs[Any]]) -> int:
    """Bytes of what graphs read and return, when all are captured; logits share the memory of the largest."""
    for graphs in sets:
        while graphs.capture_next():
            pass
    static = [graphs._static for graphs in sets]
    inputs = sum(one._arriving.nbytes + one.block_tables.nbytes for one in static)
    logits = max((logits.nbytes for graphs in sets for logits in graphs._logits.values()), default=0)
    return inputs + logits + sum(output.nbytes for graphs in sets for _, output in graphs._graphs.values())


def captured_as(config: EngineConfig) -> EngineConfig:
    """The configuration under which a GPU has the graphs that were rehearsed."""
    return replace(config, model=replace(config.model, cuda_graphs=",".join(map(str, SIZES))))


@pytest.mark.parametrize("model", ["llama3-gqa-rope", "gemma3", "gemma2"])
def test_the_plan_counts_what_the_graphs_of_one_process_keep(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of KV groups each has block tables. Capped logits are made from those that the head gave."""
    rehearse_graphs(monkeypatch, SIZES)
    make_checkpoint(model, tmp_path)
    save_tokenizer(tmp_path)
    engine = make_engine(tmp_path, scheduler={"max_num_batched_tokens": 140})
    runner, groups = model_worker(engine).runner, engine.memory_plan.groups
    assert (groups.num_groups > 1) is (model != "llama3-gqa-rope")
    layers = runner.layered.graphs
    assert len(layers.shapes) == (engine.spec.num_layers if groups.num_groups == 1 else 0)  # its contexts are too short
    planned = graph_memory(engine.spec, captured_as(engine.config), GPU, groups.num_groups)
    sets: list[StepGraphs[Any]] = [runner._graphs, runner._prompt_graphs, *([layers] if layers.shapes else [])]
    held = held_bytes(sets) + layers._rows.nbytes + runner._drawn.token_ids.nbytes + runner._drawn.draws.num_bytes
    if engine.spec.logit_soft_cap is not None:
        held += max(SIZES) * engine.spec.vocab_size * GPU.dtype.itemsize
    assert planned == GraphMemory(256, held)


def test_the_plan_counts_the_sets_of_graphs_of_stages(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage has one for each step underway, and none for prompts; the others keep what arrives."""
    rehearse_graphs_of_ranks(monkeypatch, SIZES)
    engine = make_engine(llama, scheduler={"max_num_batched_tokens": 40}, parallel=ParallelConfig(1, 3))
    try:
        runner = model_worker(engine).runner
        stage, drawn = runner._stage, runner._drawn.token_ids.nbytes + runner._drawn.draws.num_bytes
        assert stage is not None and len(stage.graphs._sets) == 3
        first, *others = (
            graph_memory(engine.spec, captured_as(engine.config), replace(GPU, parallel=one))
            for one in (Parallel(stage=index, layers=(1, 1, 2)) for index in range(3))
        )
        assert first == GraphMemory(256, held_bytes(stage.graphs._sets) + drawn)
        of_one = held_bytes(stage.graphs._sets[:1]) + drawn + 256 * engine.spec.hidden_size * 4
        assert others == [GraphMemory(256, of_one)] * 2
    finally:
        engine.close()


def test_the_workspace_holds_what_graphs_keep(llama: Path) -> None:
    """Stages with drafts have no graphs."""
    spec = read_spec(llama)
    graphs = captured_as(EngineConfig(model=ModelConfig(max_model_len=256), scheduler=SchedulerConfig(max_num_seqs=4)))
    drafting = replace(graphs, speculation=speculation_config(methods="ngram"))
    for hardware in (GPU, replace(GPU, parallel=Parallel(stage=1, layers=(2, 2)))):
        kept = graph_memory(spec, graphs, hardware)
        more = without_graphs(spec, graphs, hardware)
        width = 8 * spec.hidden_size + 3 * spec.layers[0].mlp.width
        assert more == kept.num_tokens * width * 4 + kept.held_bytes > 0
        assert (without_graphs(spec, drafting, hardware) > 0) is (hardware is GPU)


def without_graphs(spec: DecoderSpec, config: EngineConfig, hardware: Hardware) -> int:
    """How much less the workspace is without them."""
    off = replace(config, model=replace(config.model, cuda_graphs="off"))
    return workspace_bytes(spec, config, hardware) - workspace_bytes(spec, off, hardware)


def test_the_table_says_what_each_stage_takes_in_all(llama: Path) -> None:
    """The pool has as many blocks in all stages: a stage of few layers leaves memory unused."""
    layers = Parallel(layers=(1, 3))
    config = EngineConfig(model=ModelConfig(model=str(llama), max_model_len=256, load_format="dummy"))
    plan = plan_memory(read_spec(llama), config, replace(GPU, parallel=layers), 3 * GIB // 32)
    first, second = plan.stages
    assert plan.stage == 1 and second.pool_bytes(plan.num_blocks) == plan.pool_bytes
    assert first.pool_bytes(plan.num_blocks) == plan.pool_bytes // 3
    total = second.weight_bytes + second.workspace_bytes + plan.pool_bytes
    assert second.total_bytes(plan.num_blocks) == total == plan.weight_bytes + plan.workspace_bytes + plan.pool_bytes
    assert first.total_bytes(plan.num_blocks) < 0.75 * total
    said = str(plan)
    assert f"{total / (1 << 20):.1f} MiB" in next(
        line for line in said.splitlines() if "stage 1: layers 1 to 3" in line
    )
    assert "here and below those of stage 1, where the fewest blocks fit" in said
