"""CUDA graphs without a GPU: a replay computes again what would have been captured, over the same static tensors.

So everything around graphs runs as on a GPU: which step takes which, how it is padded and spread, static tensors that
are written over, heads that draft in graphs behind verifications, and outputs that are good until the next replay only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from slipstream.worker import cuda_graphs, model_runner
from slipstream.worker.computed_rows import ComputedRows
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.spec_decode import draft_graphs
from slipstream.worker.spec_decode.head_graphs import HeadGraphs


class Rehearsal:
    """run: what a graph would hold. Outputs of one pool lie in the same memory: a replay spoils those of the others."""

    def __init__(self, run: Callable[[], torch.Tensor], pool: list[torch.Tensor]) -> None:
        self._run, self._pool = run, pool
        self.output = run()
        pool.append(self.output)
        self.num_replays = 0

    def replay(self) -> None:
        found = self._run()
        for other in self._pool:
            other.fill_(float("nan") if other.is_floating_point() else -1)
        self.output.copy_(found)
        self.num_replays += 1


def rehearse_graphs(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """From now on engines on a CPU have graphs for so many requests. Steps are measured as if all took as long."""
    pool: list[torch.Tensor] = []

    def capture(graphs: StepGraphs[Any], beside: StepGraphs[Any] | None = None) -> None:
        for shape in reversed(graphs._shapes):
            batch = graphs._batch(shape, shape.num_logits)
            one = Rehearsal(lambda batch=batch: graphs._forward(batch), pool)  # type: ignore[misc]
            graphs._graphs[shape] = one, one.output  # type: ignore[assignment]

    def capture_heads(heads: HeadGraphs, rows: Sequence[ComputedRows]) -> None:
        of_heads: list[torch.Tensor] = []
        for one in rows:
            assert one.graph is not None
            one.hidden.zero_()
            draft = Rehearsal(lambda one=one: heads._draft(one), of_heads)  # type: ignore[misc]
            heads._graphs[one.graph] = draft, draft.output  # type: ignore[assignment]

    for module in (model_runner, draft_graphs):
        monkeypatch.setattr(module, "graph_sizes", lambda *arguments: sizes)
    monkeypatch.setattr(StepGraphs, "capture", torch.inference_mode()(capture))
    monkeypatch.setattr(HeadGraphs, "capture", torch.inference_mode()(capture_heads))
    monkeypatch.setattr(HeadGraphs, "seconds", lambda heads: {})
    monkeypatch.setattr(cuda_graphs, "seconds_of", seconds_of)


def seconds_of(run: Callable[[], object]) -> float:
    """All take as long, once they have run."""
    run()
    return 1e-3


def num_replays(graphs: StepGraphs[Any]) -> int:
    return sum(graph.num_replays for graph, _ in graphs._graphs.values())
