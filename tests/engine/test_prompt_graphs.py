"""Steps with prompts in CUDA graphs: which steps fit, how they lie there, and that they say what eager ones say."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, announce, make_engine, model_worker, run_all
from rank_threads import on_each, parallels
from rehearsed_graphs import rehearse_graphs, rehearse_graphs_of_ranks
from slipstream.core.config import ParallelConfig
from slipstream.core.control import SLEEP, WAKE_UP, Control
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.engine import residency
from slipstream.engine.engine import Engine
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.parallel import Parallel
from slipstream.worker import cuda_graphs
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.graph_shapes import MAX_TOKENS, GraphShape, PromptShape, prompt_shapes
from slipstream.worker.input_batch import PendingRows
from slipstream.worker.static_tensors import GraphInputs
from step_arrays import step_of
from tiny_model import make_tiny_llama

CPU = torch.device("cpu")


def test_shapes_are_multiples_of_a_tile_with_rooms_for_decodes() -> None:
    shapes = prompt_shapes((1, 2, 40), 300)
    assert shapes == [PromptShape(size, room) for size in (128, 256, 384) for room in (0, 32, 40)]
    assert prompt_shapes((), 300) == []
    assert max(shape.num_tokens for shape in prompt_shapes((256,), 100_000)) == MAX_TOKENS
    assert all(shape.num_decodes < shape.num_tokens for shape in prompt_shapes((512,), 2048))
    large = [shape for shape in prompt_shapes((200,), 1800) if shape.num_tokens > 1280]
    assert large == [PromptShape(size, room) for size in (1536, 1792, 2048) for room in (0, 128, 200)]


def test_a_step_takes_the_smallest_graph_that_holds_it() -> None:
    graphs = StepGraphs(prompt_shapes((40,), 512), GraphInputs(16, 100, CPU), lambda batch: batch.token_ids)
    assert graphs.shape_for(step_of([1, 1, 90])) == PromptShape(128, 32)
    assert graphs.shape_for(step_of([128])) == PromptShape(128, 0)
    assert graphs.shape_for(step_of([1, 128])) == PromptShape(256, 32)
    assert graphs.shape_for(step_of([1] * 33 + [60, 20, 2])) == PromptShape(128, 40)
    assert graphs.shape_for(step_of([5] * 64)) == PromptShape(384, 0)
    assert graphs.shape_for(step_of([5] * 65)) is None  # too many prompts
    assert graphs.shape_for(step_of([1] * 41 + [60])) is None  # too many decodes
    assert graphs.shape_for(step_of([513])) is None and graphs.shape_for(step_of([1, 1])) is None
    assert graphs.shape_for(step_of([1, 60], tree=True)) is None
    drafts = replace(step_of([3, 60]), logits_indices=np.array([0, 1, 2, 62]))
    assert graphs.shape_for(drafts) is None
    behind_prompts = PendingRows(np.array([5]), np.array([0]), are_first=False, in_order=False)
    assert graphs.shape_for(replace(step_of([1, 60]), pending=behind_prompts)) is None


def test_prompts_lie_behind_the_room_for_decodes() -> None:
    graphs = StepGraphs([PromptShape(16, 4, 3)], GraphInputs(16, 100, CPU), lambda batch: batch.token_ids)
    graphs.load(PromptShape(16, 4, 3), step_of([1, 1, 1, 1, 6, 5, 1]))  # leaves something everywhere
    step = replace(step_of([1, 1, 5, 3]), logits_indices=np.array([0, 1, 9]))  # the first prompt goes on
    batch = graphs.load(PromptShape(16, 4, 3), step)
    graphs._static.unpack(PromptShape(16, 4, 3))
    ids = [100, 101, 0, 0, 102, 103, 104, 105, 106, 107, 108, 109, 0, 0, 0, 0]
    assert batch.token_ids.tolist() == ids
    assert batch.slot_mapping.tolist() == [i + 900 if i else -1 for i in ids]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4, 9, 12, 13]
    assert batch.seq_lens.tolist() == [11, 11, 0, 0, 15, 13, 0]
    assert batch.block_tables[:, :2].tolist()[4:6] == [[4, 5], [6, 7]]
    assert batch.logits_indices.tolist() == [0, 1, 11]
    assert (batch.num_decode_requests, batch.num_decode_tokens, batch.max_decode_query_len) == (4, 4, 1)
    assert batch.max_query_len == 12


def test_a_captured_step_computes_what_the_plain_one_does(tmp_path: Path) -> None:
    """The forward pass that a graph would capture, run plainly over its tensors: same hidden states, same cache."""
    checkpoint = make_tiny_llama(tmp_path, head_dim=64)
    plain, padded = (make_engine(checkpoint, scheduler={"max_num_batched_tokens": 28}) for _ in range(2))
    hidden = [_last_step(engine, pads) for engine, pads in ((plain, False), (padded, True))]
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-5, atol=1e-5)


def _mixed_step(engine: Engine, *lengths: int) -> ScheduledStep:
    """Decodes of the first two lengths beside prompts of the others."""
    prompts = [[(5 * index + place) % 90 + 5 for place in range(length)] for index, length in enumerate(lengths)]
    for prompt in prompts[:2]:
        engine.submit(Request(prompt, GREEDY))
    engine.step()
    for prompt in prompts[2:]:
        engine.submit(Request(prompt, GREEDY))
    engine._drain_inbox([])
    return engine.scheduler.schedule()


def _last_step(engine: Engine, pads: bool) -> torch.Tensor:
    """Two decodes beside two prompts, of which one goes on later."""
    runner = model_worker(engine).runner
    step = _mixed_step(engine, 3, 21, 21, 9)
    assert step.num_scheduled_tokens == [1, 1, 21, 5]
    message, _ = announce(engine, step)
    with torch.inference_mode():
        arrays = runner._builder.arrays(message)
        if not pads:
            return runner._run_last(runner._builder.tensors(arrays))
        shape = PromptShape(40, 6, 3)
        graphs = StepGraphs([shape], GraphInputs(runner._builder.max_blocks, 128, CPU), runner._run_last)
        graphs.warm_up()  # nothing is loaded yet
        graphs.load(shape, arrays)
        return graphs._run(shape)[0][: len(arrays.logits_indices)]


@pytest.mark.parametrize(("launch_s", "kept"), [((0.0, 0.05), [1, 1]), ((0.0, 0.0), [0, 0])])
def test_the_rank_that_launches_last_keeps_a_graph(
    launch_s: tuple[float, float], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a rank that launches sooner wait for the others: to it they seem to take long.

    By a clock of each rank's own: a machine's pause would lengthen a launch."""
    here = threading.local()

    def forward(batch: ForwardBatch) -> torch.Tensor:
        here.now += launch_s[here.rank]
        return batch.positions

    def synchronize() -> None:
        here.now += 0.05 - launch_s[here.rank]

    def shapes_of(parallel: Parallel) -> torch.Tensor:
        here.rank, here.now = parallel.rank, 0.0
        graphs = StepGraphs([PromptShape(40, 6, 3)], GraphInputs(4, 128, CPU), forward)
        graphs.keep_launch_bound(parallel.any_of)
        return torch.tensor(len(graphs.shapes))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(cuda_graphs, "time", SimpleNamespace(perf_counter=lambda: here.now))
    assert [int(found) for found in on_each(parallels(2), shapes_of)] == kept


@pytest.mark.parametrize("num_bound", range(9))
def test_sizes_are_kept_up_to_the_first_that_takes_longer_than_its_launches(
    num_bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few are timed; every shape that is kept has run before, so that no step compiles its kernels."""
    now, ran, timed = 0.0, set[PromptShape](), list[int]()
    shapes = prompt_shapes((300,), 1024)
    by_batch = {(shape.num_tokens, shape.num_decodes): shape for shape in shapes}

    def forward(batch: ForwardBatch) -> torch.Tensor:
        nonlocal now
        now += 0.01
        shape = by_batch[len(batch.token_ids), batch.num_decode_requests]
        ran.add(shape)
        timed.append(shape.num_tokens)
        return batch.positions

    def synchronize() -> None:
        nonlocal now
        now += 0.01 if timed and timed[-1] > 128 * num_bound else 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(cuda_graphs, "time", SimpleNamespace(perf_counter=lambda: now))
    graphs, decided = StepGraphs(shapes, GraphInputs(4, 128, CPU), forward), list[bool]()

    def any_of(word: bool) -> bool:
        decided.append(word)
        return word

    graphs.keep_launch_bound(any_of)
    assert {shape.num_tokens for shape in graphs.shapes} == {128 * size for size in range(1, num_bound + 1)}
    assert list(graphs.shapes) == [shape for shape in shapes if shape.num_tokens <= 128 * num_bound]
    assert ran >= set(graphs.shapes) and len(decided) <= 4


def test_the_graph_of_a_prompt_is_captured_by_the_first_step_that_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start decodes have theirs, and the largest prompt, whose memory all others take."""
    rehearse_graphs(monkeypatch, (1, 3, 8))
    monkeypatch.setattr(StepGraphs, "keep_launch_bound", lambda *arguments: None)
    checkpoint, no_hits = make_tiny_llama(tmp_path, head_dim=64), {"enable_prefix_caching": False}
    engine = make_engine(checkpoint, cache=no_hits, scheduler={"max_num_batched_tokens": 300})
    runner = model_worker(engine).runner
    decodes, prompts = runner._graphs, runner._prompt_graphs
    largest = prompts.shapes[-1]
    assert {*prompts._graphs} == {largest} and largest.num_tokens == 384
    short = [shape for shape in decodes.shapes if shape.max_query_len > 1]
    assert {*decodes._graphs} == {*decodes.shapes} - {*short[:-1]} and len(short) > 3
    at_start = {*decodes._graphs}
    engine.residency._may_prepare = False
    for length, of_prompts, of_decodes in (
        (100, {PromptShape(128, 0)}, set()),
        (90, {PromptShape(128, 0)}, set()),  # there already
        (30, {PromptShape(128, 0)}, {GraphShape(32, 64, 1)}),
    ):
        engine.submit(Request(list(range(5, 5 + length)), GREEDY))
        while engine.has_work:
            engine.step()
        assert {*prompts._graphs} == {largest} | of_prompts and {*decodes._graphs} == at_start | of_decodes


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_idle_engine_captures_the_graphs_of_prompts(
    num_ranks: int, tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, and after it has been woken again."""
    monkeypatch.setattr(residency, "_IDLE_S", 0.0)
    rehearse_graphs_of_ranks(monkeypatch, (1, 4))
    checkpoint = make_tiny_llama(tmp_path)
    expected = [told.token_ids for told in run_all(make_engine(checkpoint, {"cuda_graphs": "off"}), prompts, GREEDY)]
    engine = make_engine(checkpoint, parallel=ParallelConfig(num_ranks), scheduler={"max_num_batched_tokens": 140})
    try:
        for _ in range(2):
            runner = model_worker(engine).runner
            sets = runner._graphs, runner._prompt_graphs
            num_shapes, num_captured = sum(len(one.shapes) for one in sets), sum(len(one._graphs) for one in sets)
            for num_steps in range(1, num_shapes - num_captured + 3):
                engine.step()
                assert sum(len(one._graphs) for one in sets) == min(num_shapes, num_captured + num_steps)
            assert num_shapes - num_captured > 3 and not engine.residency._may_prepare
            assert [told.token_ids for told in run_all(engine, prompts, GREEDY)] == expected
            for control in (Control(SLEEP, 1), Control(WAKE_UP)):
                engine.post(control)
                engine.step()
    finally:
        engine.close()


def test_neither_an_answer_nor_the_next_request_waits_for_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that tells something captures nothing, nor do the next ones until the engine has been idle for a while."""
    now = 1000.0
    monkeypatch.setattr(residency, "time", SimpleNamespace(monotonic=lambda: now))
    engine = make_engine(make_tiny_llama(tmp_path))
    captures: list[float] = []
    monkeypatch.setattr(model_worker(engine), "prepare", lambda: captures.append(now) or True)
    for _ in range(2):
        engine.submit(Request([5, 6, 7], GREEDY))
        while engine.has_work:
            engine.step()
            now += 10.0
        engine.step()
        now += 0.9 * residency._IDLE_S
        engine.step()
    assert captures == []
    now += residency._IDLE_S
    engine.step()
    engine.step()
    assert captures == [now, now]
    for command in (SLEEP, WAKE_UP):
        now += 10.0
        engine.post(Control(command))
        engine.step()
    assert captures == [now - 20.0] * 2, "who has woken the model asks at once"


def test_without_memory_for_a_graph_steps_are_launched_kernel_by_kernel(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rehearse_graphs(monkeypatch, (1, 4))
    engine = make_engine(make_tiny_llama(tmp_path))
    expected = [told.token_ids for told in run_all(engine, prompts, GREEDY)]
    engine = make_engine(tmp_path)

    def record(graphs: StepGraphs[GraphShape], shape: GraphShape) -> None:
        raise torch.OutOfMemoryError("no memory\nat all")

    monkeypatch.setattr(StepGraphs, "_record", record)
    assert [told.token_ids for told in run_all(engine, prompts, GREEDY)] == expected
    runner = model_worker(engine).runner
    assert not runner.capture_next() and {*runner._graphs.shapes} == {*runner._graphs._graphs}
    assert "no memory to capture them (no memory)" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_graph_is_eager(
    tmp_path: Path, prompts: list[list[int]], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.worker.cuda_graphs.LAUNCH_BOUND", 1e9)
    checkpoint = make_tiny_llama(tmp_path, head_dim=64)
    prompts = [prompt * 5 for prompt in prompts]  # beyond what decode kernels take
    model, scheduler = {"device": "cuda", "dtype": "float32"}, {"max_num_batched_tokens": 150}
    params = [replace(GREEDY, max_tokens=12 + 5 * index) for index in range(len(prompts))]
    texts = []
    for graphs in ("off", "1,3,8"):
        engine = make_engine(
            checkpoint,
            {**model, "cuda_graphs": graphs},
            {"block_size": 16},
            {**scheduler, "overlap_scheduling": overlap if graphs != "off" else "off"},
        )
        replayed = _count_replays(engine, monkeypatch)
        texts.append([told.token_ids for told in run_all(engine, prompts, params)])
        assert bool(replayed) == (graphs != "off")
    assert texts[0] == texts[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_gives_what_its_kernels_give_on_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16, two decodes and two prompts: bit for bit on the padded tensors, closely without padding."""
    monkeypatch.setattr("slipstream.worker.cuda_graphs.LAUNCH_BOUND", 1e9)
    engine = make_engine(
        make_tiny_llama(tmp_path, head_dim=64),
        {"device": "cuda", "dtype": "bfloat16", "cuda_graphs": "8"},
        {"block_size": 16},
        {"overlap_scheduling": "off"},
    )
    message, states = announce(engine, _mixed_step(engine, 3, 200, 70, 90))
    runner = model_worker(engine).runner
    with torch.inference_mode():
        plain = runner._run_last(runner._builder.tensors(runner._builder.arrays(message)))
        inputs = runner.build(message, states)
        shape = inputs.prompt_graph
        assert shape == PromptShape(256, 8)
        replayed = runner.forward(inputs).clone()
        padded = runner._run_last(runner._prompt_graphs._batch(shape, shape.num_logits))
    assert replayed.shape[0] == 4 and torch.equal(replayed, padded[:4])
    torch.testing.assert_close(replayed, plain, rtol=3e-2, atol=3e-2)


def _count_replays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[PromptShape]:
    replayed: list[PromptShape] = []
    graphs = model_worker(engine).runner._prompt_graphs
    replay = graphs.replay

    def counted(shape: PromptShape) -> torch.Tensor:
        replayed.append(shape)
        return replay(shape)

    monkeypatch.setattr(graphs, "replay", counted)
    return replayed
