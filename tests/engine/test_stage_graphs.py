"""Decodes of a model in stages replayed from graphs, several underway at once, say what one process says."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from engine_driver import GREEDY, make_engine, run_all
from frozen import frozen
from rehearsed_graphs import num_replays, rehearse_graphs_of_ranks
from slipstream.core.config import ParallelConfig
from slipstream.core.errors import EngineError
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.start_up import StartUp
from slipstream.engine.rank_processes import RankProcess
from slipstream.engine.ranks import LeadingWorker
from slipstream.worker import process_group
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.residency import collect_all
from slipstream.worker.worker import ModelWorker
from tiny_model import make_tiny_llama

SEEDED = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True, top_k=50, top_p=0.95)
EDITED = replace(SEEDED, repetition_penalty=1.2, min_tokens=5, logit_bias=((7, 2.0),), logprobs=2)


def test_graphs_of_stages(tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tensors outlive the launch of later steps; all stages pad alike, or they would wait for ever."""
    model = make_tiny_llama(tmp_path, num_layers=4)
    params = [GREEDY, SEEDED, EDITED, GREEDY, SEEDED, EDITED, GREEDY]
    texts = [prompts[4 + index % 8] for index in range(len(params))]
    expected = run_all(make_engine(model), texts, params)
    rehearse_graphs_of_ranks(monkeypatch, (1, 2, 4))
    three = ParallelConfig(pipeline_parallel_size=3)
    engine = make_engine(model, {}, {}, {"max_num_batched_tokens": 40}, parallel=three)
    try:
        assert isinstance(engine.worker, LeadingWorker) and isinstance(engine.worker.worker, ModelWorker)
        stage = engine.worker.worker.runner._stage
        assert stage is not None
        found = run_all(engine, texts, params)
        assert [(one.error, one.token_ids) for one in found] == [("", one.token_ids) for one in expected]
        for one, other in zip(found, expected, strict=True):
            for own, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert own.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        sets = stage.graphs._sets
        assert len(sets) == 3 and all(num_replays(graphs) > 5 for graphs in sets), "in turns"
    finally:
        engine.close()


def graphs_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, when this rank leaves the others, how many of all graphs that were made there still are."""
    made: weakref.WeakSet[StepGraphs[Any]] = weakref.WeakSet()
    found: list[int] = []
    make = StepGraphs.__init__

    def noted(graphs: StepGraphs[Any], *arguments: Any, **options: Any) -> None:
        make(graphs, *arguments, **options)
        made.add(graphs)

    def collect() -> None:
        assert made, "graphs were made"
        collect_all()
        found.append(len(made))

    monkeypatch.setattr(StepGraphs, "__init__", noted)
    monkeypatch.setattr(process_group, "collect_all", collect)
    return found


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)], ids=["ranks", "stages"])
def test_no_graph_is_left_when_ranks_leave(
    size: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends no communicator that a graph still calls, not even one that the garbage collector has frozen."""
    rehearse_graphs_of_ranks(monkeypatch, (1, 2))
    left = graphs_left(monkeypatch)
    engine = make_engine(make_tiny_llama(tmp_path), parallel=ParallelConfig(size, num_stages))
    run_all(engine, [[5, 6, 7]], GREEDY)
    with frozen():
        engine.close()
        assert left == [0] and gc.get_freeze_count() > 0


@pytest.mark.parametrize("place", ["ready", "capture", "behind"])
def test_no_graph_is_left_of_a_failed_load(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where another rank has failed, nor this one while it captured or when it had loaded."""
    rehearse_graphs_of_ranks(monkeypatch, (1, 2))
    left = graphs_left(monkeypatch)
    receive = RankProcess.receive

    def failing(*arguments: object, **options: object) -> NoReturn:
        raise EngineError("no memory")

    def ready(rank: RankProcess, awaited: str, *arguments: Any) -> Any:
        return failing() if awaited == "ready" else receive(rank, awaited, *arguments)

    if place == "ready":
        monkeypatch.setattr(RankProcess, "receive", ready)
    elif place == "capture":
        monkeypatch.setattr("slipstream.worker.model_runner.ModelRunner._time_steps", failing)
        monkeypatch.setattr("slipstream.worker.worker.measured_costs", failing)
    else:
        monkeypatch.setattr(StartUp, "log", failing)
    with pytest.raises(EngineError, match="no memory"):
        make_engine(make_tiny_llama(tmp_path), parallel=ParallelConfig(2))
    assert left == [0]
