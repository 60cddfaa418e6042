"""Decode steps replayed from CUDA graphs say what eager steps say, padded or not, overlapped or not; sizes as data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, Told, announce, make_engine, model_worker, run_all, run_steps
from rehearsed_graphs import num_replays, rehearse_graphs
from slipstream.core.config import SpeculationConfig
from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.engine.engine import Engine
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.drawn_tokens import DrawnTokens
from slipstream.worker.graph_shapes import (
    DEFAULT_SIZES,
    DraftLayout,
    GraphShape,
    graph_shapes,
    graph_sizes,
    slower_than_larger,
)
from slipstream.worker.input_batch import PendingRows, SampledTokens, StepArrays
from slipstream.worker.launched_step import StepTensors
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.static_tensors import GraphInputs, StaticTensors
from step_arrays import step_of
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
    assert graph_sizes("auto", 17, CUDA, has_experts=True) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17)
    assert graph_sizes("auto", 600, CUDA)[-2:] == (512, 600) and DEFAULT_SIZES[-1] == 1024
    assert {*DEFAULT_SIZES} < {*graph_sizes("auto", 1024, CUDA, has_experts=True)}


def test_what_cannot_be_captured_runs_without_or_is_refused() -> None:
    assert graph_sizes("auto", 256, CUDA, "it reads the host") == ()
    with pytest.raises(ConfigError, match=r"cuda_graphs='1,2'.*it reads the host"):
        graph_sizes("1,2", 256, CUDA, "it reads the host")


def test_shapes_are_of_decodes_of_drafts_and_of_short_prompts() -> None:
    plain = graph_shapes((1, 2, 8))
    assert [shape for shape in plain if shape.max_query_len == 1] == [GraphShape(n, 1, n) for n in (1, 2, 8)]
    assert {(shape.num_tokens, shape.num_requests) for shape in plain if shape.max_query_len == 64} == {
        (16, 1), (32, 1), (64, 1), (16, 8), (32, 8), (64, 8), (128, 8), (256, 8), (512, 8),
    }  # fmt: skip
    drafted = set(graph_shapes((1, 100), DraftLayout(5, has_trees=True))) - set(graph_shapes((1, 100)))
    sizes = {(shape.num_tokens, shape.num_requests) for shape in drafted}
    assert sizes == {(2, 1), (4, 1), (6, 1), (200, 100), (400, 100)}
    assert all(shape.is_tree and shape.max_query_len == 6 for shape in drafted)
    alike = graph_shapes((1, 100), DraftLayout(5, are_ragged=False))
    assert {GraphShape(200, 2, 100), GraphShape(400, 4, 100), GraphShape(6, 6, 1)} <= set(alike), "no longer than it is"
    assert graph_shapes(()) == []


def _graphs(shapes: list[GraphShape]) -> StepGraphs:
    return StepGraphs(shapes, GraphInputs(16, 100, CPU), lambda batch: batch.token_ids)


def test_a_step_takes_the_smallest_graph_that_holds_it() -> None:
    graphs = _graphs(graph_shapes((1, 4, 8), DraftLayout(3, has_trees=True)))
    found = [graphs.shape_for(step_of([1] * count)) for count in (1, 2, 4, 5, 8, 9)]
    assert found == [GraphShape(n, 1, n) for n in (1, 4, 4, 8, 8)] + [None]
    assert graphs.shape_for(step_of([3, 1])) == GraphShape(8, 4, 4, True)  # two drafts and none
    assert graphs.shape_for(step_of([3, 1], tree=True)) == GraphShape(8, 4, 4, True)
    assert graphs.shape_for(step_of([4, 4, 4])) == GraphShape(16, 4, 4, True)
    assert graphs.shape_for(step_of([1, 1, 20])) == GraphShape(32, 64, 4)
    assert graphs.shape_for(step_of([1, 1, 20], tree=True)) is None
    assert graphs.shape_for(step_of([1, 65])) is None and graphs.shape_for(step_of([1, 20], num_decodes=1)) is None
    assert _graphs([]).shape_for(step_of([1])) is None


def test_a_graph_that_is_slower_than_one_with_more_room_is_not_kept() -> None:
    rows = {
        GraphShape(448, 4, 112): 15.7, GraphShape(512, 4, 128): 11.8, GraphShape(512, 64, 8, True): 9.0,
        GraphShape(384, 4, 96): 9.1, GraphShape(64, 2, 32): 4.4, GraphShape(64, 1, 64): 5.0,
        GraphShape(128, 2, 64): 4.3,
    }  # fmt: skip
    assert slower_than_larger(rows) == [GraphShape(448, 4, 112)], "room for as many requests; 2 % are chance"


@pytest.mark.parametrize(("max_blocks", "seq_len"), [(3, 48), (100, 1024 + 16)])
def test_steps_are_timed_with_no_more_tokens_than_fit(max_blocks: int, seq_len: int) -> None:
    """Three blocks of 16 are all that max_model_len = 48 has."""
    plan = SimpleNamespace(block_size=16, num_blocks=500, max_model_len=16 * max_blocks)
    shape = GraphShape(64, 16, 4)
    tensors = StaticTensors([shape], GraphInputs(max_blocks, 16 * max_blocks, CPU))
    tensors.pretend(shape, 1024, cast(MemoryPlan, plan))
    assert tensors.seq_lens.tolist() == [seq_len] * 4
    assert tensors.positions.tolist() == list(range(seq_len - 16, seq_len)) * 4
    assert len(set(tensors.block_tables[0, :, : seq_len // 16].flatten().tolist())) == 4 * (seq_len // 16)


def test_padding_writes_nothing_and_sees_nothing() -> None:
    graphs = _graphs(graph_shapes((1, 4), DraftLayout(3, has_trees=True)))
    graphs.load(GraphShape(16, 4, 4, True), step_of([4, 4, 4, 4]))  # leaves something everywhere
    batch = graphs.load(GraphShape(8, 4, 4, True), step_of([3, 1]))
    graphs._static.unpack(GraphShape(8, 4, 4, True))
    assert batch.token_ids.tolist() == [100, 101, 102, 103, 0, 0, 0, 0]
    assert batch.positions.tolist() == [10, 11, 12, 10, 0, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [1000, 1001, 1002, 1003, -1, -1, -1, -1]
    assert batch.query_start_loc.tolist() == [0, 3, 4, 5, 6] and batch.seq_lens.tolist() == [13, 11, 0, 0]
    assert batch.block_tables[:2, :2].tolist() == [[0, 1], [2, 3]] and batch.logits_indices.tolist() == [2, 3]
    assert batch.tree_mask is not None and batch.tree_mask.tolist() == [1, 3, 7, 1, 1, 1, 1, 1]
    full = graphs.load(GraphShape(4, 1, 4), step_of([1, 1, 1]))
    assert full.query_start_loc.tolist() == [0, 1, 2, 3, 4] and full.tree_mask is None
    assert full.num_decode_requests == 4 and full.num_decode_tokens == 4 and full.max_query_len == 1


@pytest.mark.parametrize("seed", range(4))
def test_static_tensors_are_those_of_a_first_step(seed: int) -> None:
    """Requests join and leave, tables widen, prompts and trees come between, tokens are pending: as if nothing had been
    loaded before."""
    dice = np.random.default_rng(seed)
    shapes, num_groups = graph_shapes((1, 4, 8), DraftLayout(3, has_trees=True)), 1 + seed % 2
    drawn = torch.arange(1000, 1008)
    inputs = GraphInputs(16, 100, CPU, num_groups, drawn)
    kept = StepGraphs(shapes, inputs, lambda batch: batch.token_ids)
    count = width = num_decodes = 0
    for _ in range(150):
        if dice.random() < 0.3:
            count, width = int(dice.integers(1, 9)), int(dice.integers(1, 17))
        is_decode = count > 0 and dice.random() < 0.8
        lengths = [1] * count if is_decode else dice.integers(1, 4, size=int(dice.integers(1, 9))).tolist()
        step = _random_step(dice, lengths, max(1, width), num_groups, tree=not is_decode and dice.random() < 0.5)
        if is_decode and count > 1 and dice.random() < 0.2:  # the last token of a chunk: not sampled
            step = replace(step, logits_indices=step.logits_indices[:-1])
        if dice.random() < 0.6:
            step = replace(step, pending=_random_pending(dice, step))
        shape = kept.shape_for(step)
        assert shape == kept._smallest_for(step) is not None
        fresh_graphs = StepGraphs(shapes, inputs, lambda batch: batch.token_ids)
        found, fresh = (graphs.load(shape, step) for graphs in (kept, fresh_graphs))
        for graphs in (kept, fresh_graphs):
            graphs._static.unpack(shape)
        expected = torch.tensor(step.token_ids)
        expected[step.pending.places] = drawn[step.pending.sources]
        assert torch.equal(found.token_ids[: len(expected)], expected)
        for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping", "logits_indices"):
            assert torch.equal(getattr(found, name), getattr(fresh, name)), name
        assert (found.tree_mask is None) == (fresh.tree_mask is None)
        assert found.tree_mask is None or torch.equal(found.tree_mask, fresh.tree_mask)
        rows, columns = step.block_tables.shape
        for group, tables in enumerate([step.block_tables, *([] if num_groups == 1 else step.other_tables)]):
            own, first = found.of_group(group), fresh.of_group(group)
            assert own.block_tables[:rows, :columns].tolist() == tables.tolist()
            assert torch.equal(own.slot_mapping, first.slot_mapping)
        num_decodes += is_decode
    assert num_decodes > 50


def _random_step(
    dice: np.random.Generator, lengths: list[int], width: int, num_groups: int, tree: bool = False
) -> StepArrays:
    total, count, num_others = sum(lengths), len(lengths), num_groups - 1
    others, slots = dice.integers(99, size=(num_others, count, width)), dice.integers(99, size=(num_others, total))
    return replace(
        step_of(lengths, tree=tree),
        token_ids=dice.integers(99, size=total),
        positions=dice.integers(99, size=total),
        slot_mapping=dice.integers(99, size=total),
        seq_lens=dice.integers(99, size=count).astype(np.int32),
        block_tables=dice.integers(99, size=(count, width)).astype(np.int32),
        other_tables=others.astype(np.int32) if num_others else None,
        other_slots=slots if num_others else None,
    )


def _random_pending(dice: np.random.Generator, step: StepArrays) -> PendingRows:
    """The first token of some requests, or all of them in order."""
    starts = step.query_start_loc[:-1]
    if step.is_decode and dice.random() < 0.5:
        return PendingRows(np.arange(len(starts)), np.arange(len(starts)), True, True)
    places = np.sort(dice.choice(starts, size=int(dice.integers(1, len(starts) + 1)), replace=False)).astype(np.int64)
    sources, order = dice.permutation(8)[: len(places)], np.arange(len(places))
    are_first = np.array_equal(places, order)
    return PendingRows(places, sources, are_first, are_first and np.array_equal(sources, order))


def _texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = [
        replace(GREEDY, max_tokens=40),
        replace(GREEDY, temperature=0.8, top_p=0.9, seed=3),
        replace(GREEDY, repetition_penalty=1.3, max_tokens=7),
        replace(GREEDY, logprobs=2, max_tokens=11),
    ] * 3
    return [told.token_ids for told in run_all(engine, prompts, params)]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_draws_of_graphs_are_those_of_eager_steps(
    checkpoint: Path, prompts: list[list[int]], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decodes alone take what their graph drew; those that join later want its logits, and the tokens of the
    step before, whose memory the graph has taken again."""
    expected, drawn = [], []
    for sizes in ((), (1, 3, 8)):
        if sizes:
            rehearse_graphs(monkeypatch, sizes)
        engine = make_engine(checkpoint, scheduler={"overlap_scheduling": overlap if sizes else "off"})
        told: dict[Request, Told] = {}
        first = [
            Request(list(prompt), replace(GREEDY, max_tokens=40), handle=i) for i, prompt in enumerate(prompts[:2])
        ]
        for request in first:
            engine.submit(request)
        run_steps(engine, told, 9)
        later = [replace(GREEDY, repetition_penalty=1.5), replace(GREEDY, temperature=0.9, seed=4, logprobs=1)]
        late = [Request(list(prompt), params, handle=7 + i) for i, (prompt, params) in enumerate(zip(prompts, later))]
        for request in late:
            engine.submit(request)
        run_steps(engine, told)
        texts = [told[request].token_ids for request in (*first, *late)]
        expected, drawn = (texts, drawn) if not sizes else (expected, texts)
        runner = model_worker(engine).runner
        assert bool(num_replays(runner._graphs)) is bool(sizes) is bool(runner._graphs._logits)
    assert drawn == expected and [len(text) for text in drawn] == [40, 40, *2 * [GREEDY.max_tokens]]


def _joining_and_leaving(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy requests that end one by one; later one whose prompt decode graphs do not take, and a penalised one."""
    told: dict[Request, Told] = {}
    lengths = 9, 40, 17, 33, 25
    requests = [Request(list(prompts[i]), replace(GREEDY, max_tokens=n), handle=i) for i, n in enumerate(lengths)]
    later = replace(GREEDY, max_tokens=8)
    requests.append(Request([7 + place % 50 for place in range(90)], later, handle=5))
    penalised = replace(later, temperature=0.9, seed=4, repetition_penalty=1.2)
    requests.append(Request(list(prompts[0]), penalised, handle=6))
    for request in requests[:5]:
        engine.submit(request)
    run_steps(engine, told, 14)
    for request in requests[5:]:
        engine.submit(request)
        run_steps(engine, told, 6)
    run_steps(engine, told)
    return [told[request].token_ids for request in requests]


def _note_pending(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bool, bool]]:
    """For steps with pending tokens in graphs: which graph, whether in order, whether a graph has drawn the tokens."""
    found: set[tuple[str, bool, bool]] = set()
    give = DrawnTokens.give

    def noted(
        drawn: DrawnTokens, tensors: StepTensors, pending: PendingRows, sampled: SampledTokens | None = None
    ) -> None:
        if tensors.has_graph and sampled is not None and len(pending.places):
            is_there = sampled.token_ids.data_ptr() == drawn.token_ids.data_ptr()
            found.add(("decode" if tensors.prompt_graph is None else "prompt", pending.in_order, is_there))
        give(drawn, tensors, pending, sampled)

    monkeypatch.setattr(DrawnTokens, "give", noted)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.usefixtures("no_tf32")
def test_pending_tokens_reach_graphs(
    checkpoint: Path, prompts: list[list[int]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From wherever the step before has left them, in whatever order."""
    monkeypatch.setattr("slipstream.worker.cuda_graphs.LAUNCH_BOUND", 1e9)
    model = {"device": device, "dtype": "float32"}
    blocks, budget = BLOCKS_OF_16, {"max_num_batched_tokens": 128}
    eager = {**model, "cuda_graphs": "off"}
    expected = _joining_and_leaving(
        make_engine(checkpoint, eager, blocks, {**budget, "overlap_scheduling": "off"}), prompts
    )
    if device == "cpu":
        rehearse_graphs(monkeypatch, (1, 3, 8))
    else:
        model["cuda_graphs"] = "1,3,8"
    found = _note_pending(monkeypatch)
    graphs = make_engine(checkpoint, model, blocks, {**budget, "overlap_scheduling": "on"})
    assert _joining_and_leaving(graphs, prompts) == expected
    decodes = {("decode", in_order, is_there) for in_order in (True, False) for is_there in (True, False)}
    assert found >= decodes | {("prompt", True, True)}


@needs_cuda
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_graph_is_eager(checkpoint: Path, prompts: list[list[int]], overlap: str) -> None:
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
    runner = model_worker(engine).runner
    message, states = announce(engine, engine.scheduler.schedule())
    with torch.inference_mode():
        inputs = runner.build(message, states)
        assert inputs.graph == GraphShape(8, 1, 8)
        replayed = runner.forward(inputs)[:5].clone()
        drawn = runner._graphs.logits(GraphShape(8, 1, 8))
        assert drawn is not None and drawn.shape == (8, engine.spec.vocab_size)
        eager = runner._run_model(inputs.batch)  # writes the same keys and values once more
        logits = runner._model.lm_head(eager)
    assert torch.equal(replayed, eager[:5]) and torch.isfinite(eager[:5]).all()
    assert torch.equal(drawn[:5], logits[:5]), "whatever other graphs were captured in its memory"
    assert torch.equal(runner._drawn.first(5), logits[:5].argmax(dim=1))
    assert inputs.batch.seq_lens.tolist()[5:] == [0, 0, 0] and inputs.batch.slot_mapping.tolist()[5:] == [-1, -1, -1]


@needs_cuda
def test_defaults_on_a_gpu(checkpoint: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(checkpoint, {"device": "cuda", "dtype": "bfloat16"}, BLOCKS_OF_16)
    graphs, shapes = model_worker(engine).runner._graphs, set(graph_shapes((1, 2, 4, 8, 16, 24, 32, 48, 64)))
    assert engine._num_ahead == 1 and set(graphs.shapes) == shapes
    assert {shape for shape in shapes if shape.max_query_len == 1} < set(graphs._graphs) < shapes
    assert {"plan", "weights", "KV pool", "warm-up", "graphs"} <= set(engine.start_up.seconds)
    _texts(engine, prompts)  # what follows finds its prompts' blocks: in bf16 other shapes may say something else
    second = _texts(engine, prompts)
    while engine.residency._may_prepare:
        engine.step()
    assert _texts(engine, prompts) == second and set(graphs._graphs) == shapes


@needs_cuda
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("method", ["ngram", "none"])
def test_drafts_and_short_prompts_in_graphs_say_what_they_say_without(checkpoint: Path, method: str) -> None:
    """Prompts of up to 64 tokens arrive while others decode or verify; in fp32, so that the batch does not matter."""
    speculation = {} if method == "none" else {"speculation": SpeculationConfig(methods=method, num_draft_tokens=3)}
    prompts = [[5 + index, 9, 5 + index, 9] * (1 + 3 * index) for index in range(6)]
    texts = []
    for graphs in ("off", "1,4,8"):
        engine = make_engine(checkpoint, {**IN_FP32, "cuda_graphs": graphs}, BLOCKS_OF_16, **speculation)
        told: dict[Request, Told] = {}
        for prompt in prompts:
            told[engine.submit(Request(prompt, GREEDY))[0]] = Told()
            run_steps(engine, told, 3)
        run_steps(engine, told)
        texts.append([entry.token_ids for entry in told.values()])
    assert texts[0] == texts[1] and all(len(text) == GREEDY.max_tokens for text in texts[0])
