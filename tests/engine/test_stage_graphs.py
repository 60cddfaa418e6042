"""Decodes of a model in stages replayed from graphs, several underway at once, say what one process says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, make_engine, run_all
from rehearsed_graphs import num_replays, rehearse_graphs_of_ranks
from slipstream.core.config import ParallelConfig
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.ranks import LeadingWorker
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
