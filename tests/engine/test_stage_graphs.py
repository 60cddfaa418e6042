"""Decodes of a model in stages replayed from graphs, several underway at once, say what one process says."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, model_worker, run_all
from rehearsed_graphs import num_replays, rehearse_graphs_of_ranks
from slipstream.core.config import ParallelConfig
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine import ranks
from slipstream.engine.ranks import LeadingWorker
from slipstream.worker.process_group import leave
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


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)], ids=["ranks", "stages"])
def test_no_graph_is_left_when_ranks_leave(
    size: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends no communicator that a graph still calls, not even one that the garbage collector has frozen."""
    rehearse_graphs_of_ranks(monkeypatch, (1, 2))
    engine = make_engine(make_tiny_llama(tmp_path), parallel=ParallelConfig(size, num_stages))
    run_all(engine, [[5, 6, 7]], GREEDY)
    runner = model_worker(engine).runner
    kept = runner._stage.graphs._sets if runner._stage else [runner._graphs, runner._prompt_graphs]
    assert sum(map(num_replays, kept)) > 0
    graphs, left = [weakref.ref(one) for one in kept], []

    def noted(device: torch.device) -> None:
        left.extend(found for one in graphs if (found := one()) is not None)
        leave(device)

    monkeypatch.setattr(ranks, "leave", noted)
    del runner, kept
    gc.freeze()
    engine.close()
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    assert not left and is_frozen
