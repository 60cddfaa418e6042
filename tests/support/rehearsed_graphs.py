"""CUDA graphs without a GPU: a replay runs the captured function again over the same static tensors.

Everything around graphs then runs as on a GPU: the choice of a graph, padding, static tensors that are overwritten,
heads that draft in graphs after verifications, and outputs that are valid only until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from slipstream.engine import rank_processes
from slipstream.worker import cuda_graphs, model_runner
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.spec_decode import draft_graphs
from slipstream.worker.spec_decode.draft_graphs import HeadGraphs


class Rehearsal:
    """run: the captured function. Outputs of one pool share memory: a replay poisons those of the other graphs."""

    def __init__(self, run: Callable[[], Sequence[torch.Tensor]], pool: list[torch.Tensor]) -> None:
        self._run, self._pool = run, pool
        self.outputs = run()
        pool += self.outputs
        self.num_replays = 0

    def replay(self) -> None:
        found = [output.clone() for output in self._run()]  # graphs may share one output
        for other in self._pool:
            other.fill_(float("nan") if other.is_floating_point() else -1)
        for output, values in zip(self.outputs, found, strict=True):
            output.copy_(values)
        self.num_replays += 1


def rehearse_graphs(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """Give engines on a CPU graphs for these numbers of requests. All steps measure as equally long."""
    pool: list[torch.Tensor] = []

    def record(graphs: StepGraphs[Any], shape: Any) -> None:
        with _nothing_loaded(graphs):
            one = Rehearsal(lambda: _outputs(graphs, shape), pool)
        graphs._graphs[shape] = one, one.outputs[0]  # type: ignore[assignment]
        if len(one.outputs) > 1:
            graphs._logits[shape] = one.outputs[1]

    def capture_heads(heads: HeadGraphs, rows: Sequence[ComputedRows]) -> None:
        of_heads: list[torch.Tensor] = []
        for one in rows:
            one.hidden.zero_()
            if one.graph is None:
                heads._draft(one)
                continue
            draft = Rehearsal(lambda one=one: [heads._draft(one)], of_heads)  # type: ignore[misc]
            heads._graphs[one.graph] = draft, draft.outputs[0]  # type: ignore[assignment]

    for module in (model_runner, draft_graphs):
        monkeypatch.setattr(module, "graph_sizes", lambda *arguments: sizes)
    monkeypatch.setattr(StepGraphs, "_record", torch.inference_mode()(record))
    monkeypatch.setattr(HeadGraphs, "capture", torch.inference_mode()(capture_heads))
    monkeypatch.setattr(HeadGraphs, "seconds", lambda heads: {})
    monkeypatch.setattr(cuda_graphs, "seconds_of", seconds_of)


@contextmanager
def _nothing_loaded(graphs: StepGraphs[Any]) -> Iterator[None]:
    """As a capture runs nothing, its rehearsal runs padding, and leaves the static tensors as they are."""
    static = graphs._static
    tensors = [static._arriving, static.block_tables, static.drawn]
    if not hasattr(static, "rehearsed_from"):  # at start
        static.rehearsed_from = [tensor.clone() for tensor in tensors]  # type: ignore[attr-defined]
    loaded = [tensor.clone() for tensor in tensors]
    for tensor, first in zip(tensors, static.rehearsed_from):  # type: ignore[attr-defined]
        tensor.copy_(first)
    yield
    for tensor, last in zip(tensors, loaded):
        tensor.copy_(last)


def _outputs(graphs: StepGraphs[Any], shape: Any) -> list[torch.Tensor]:
    """Drawn tokens are none: they lie in a static tensor, which other graphs leave as it is."""
    hidden, logits = graphs._run(shape)
    return [hidden] if logits is None else [hidden, logits]


def rehearse_graphs_of_ranks(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """The same in the processes of the other ranks."""
    rehearse_graphs(monkeypatch, sizes)
    start, main = rank_processes._START.split("; from ")
    rehearsal = f"import pytest, rehearsed_graphs as r; r.rehearse_graphs(pytest.MonkeyPatch(), {sizes})"
    monkeypatch.setattr(rank_processes, "_START", f"{start}; {rehearsal}; from {main}")


def seconds_of(run: Callable[[], object]) -> float:
    """Run once; all functions measure as equally long."""
    run()
    return 1e-3


def num_replays(graphs: StepGraphs[Any]) -> int:
    return sum(graph.num_replays for graph, _ in graphs._graphs.values())
