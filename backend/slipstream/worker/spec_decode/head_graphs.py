"""A whole draft, first pass and all levels, as a CUDA graph behind each graph of a verification. Engine thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from slipstream.core.sampling_params import SamplingParams
from slipstream.worker.computed_rows import ComputedRows
from slipstream.worker.cuda_graphs import GraphShape, seconds_of, uncollected


class HeadGraphs:
    """draft: what is guessed behind rows, by tensor work alone. Steps that no graph was captured for run eagerly."""

    def __init__(self, draft: Callable[[ComputedRows], torch.Tensor]) -> None:
        self._draft = draft
        self._graphs: dict[GraphShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self, rows: Sequence[ComputedRows]) -> None:
        """rows: the static tensors of graphs, which a step's own are afterwards."""
        if not rows:
            return
        for one in rows:
            one.hidden.zero_()  # nothing has been written to it yet
            self._draft(one)  # compiles kernels, lets libraries choose theirs
        pool = torch.cuda.graph_pool_handle()
        with uncollected():
            for one in reversed(rows):
                assert one.graph is not None
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    guesses = self._draft(one)
                self._graphs[one.graph] = graph, guesses
        torch.cuda.synchronize()

    def seconds(self) -> dict[int, float]:
        """What drafting takes, by number of requests: behind the largest verification of so many."""
        largest = {shape.num_requests: graph for shape, (graph, _) in reversed(self._graphs.items())}
        return {num_requests: seconds_of(graph.replay) for num_requests, graph in largest.items()}

    def run(self, rows: ComputedRows) -> torch.Tensor:
        """Good until the next `run`."""
        captured = None if rows.graph is None or rows.kept is None else self._graphs.get(rows.graph)
        if captured is None:
            return self._draft(rows)
        graph, guesses = captured
        graph.replay()
        return guesses


class GraphedHead(ABC):
    """The parts of a Head whose guesses are tensor work alone, captured where there are graphs."""

    def __init__(self) -> None:
        self._graphs = HeadGraphs(self._guess)

    @abstractmethod
    def _guess(self, rows: ComputedRows) -> torch.Tensor:
        """As Head.draft."""

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    def capture(self, rows: Sequence[ComputedRows]) -> dict[int, float]:
        self._graphs.capture(rows)
        return self._graphs.seconds()

    @torch.inference_mode()
    def draft(self, rows: ComputedRows) -> torch.Tensor:
        return self._graphs.run(rows)
