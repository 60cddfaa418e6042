"""Whole drafts as CUDA graphs: a draft model's, what it missed and all levels, and a head's behind each verification.

Engine thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.batch import ForwardBatch
from slipstream.worker.cuda_graphs import StepGraphs, seconds_of, uncollected
from slipstream.worker.graph_shapes import MAX_DECODE_ROWS, GraphShape, graph_sizes
from slipstream.worker.input_batch import StepArrays, batch_tensors
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.spec_decode.draft_batch import DraftBatches
from slipstream.worker.spec_decode.interface import SpeculatorContext


class DraftGraphs:
    """draft: a batch -> what is drafted behind it, by tensor work alone.

    num_rows: tokens of one request that a graph has room for: those of one verification. refusal: why it cannot be
    captured.
    """

    def __init__(
        self,
        draft: Callable[[ForwardBatch], torch.Tensor],
        batches: DraftBatches,
        context: SpeculatorContext,
        num_rows: int,
        refusal: str | None = None,
    ) -> None:
        config, hardware = context.config, context.hardware
        self._draft = draft
        self._device = hardware.device
        sizes = graph_sizes(config.model.cuda_graphs, config.scheduler.max_num_seqs, hardware.device, refusal)
        shapes = [GraphShape(size * num_rows, num_rows, size) for size in sizes if size * num_rows <= MAX_DECODE_ROWS]
        self._graphs = StepGraphs(shapes, batches.max_blocks, batches.num_positions, draft, hardware.device)
        with torch.inference_mode():
            self._graphs.warm_up()
            self._graphs.capture()
            self._seconds = self._graphs.time_steps(shapes, context.plan, lambda tokens: None)

    def run(self, arrays: StepArrays) -> torch.Tensor:
        """Good until the next `run`."""
        shape = self._graphs.shape_for(arrays)
        if shape is None:
            return self._draft(self.tensors(arrays))
        self._graphs.load(shape, arrays)
        return self._graphs.replay(shape)

    def seconds(self) -> dict[int, float]:
        """What a draft takes, by number of requests."""
        return {shape.num_requests: took for shape, took in self._seconds.items()}

    def tensors(self, arrays: StepArrays) -> ForwardBatch:
        """For a draft that is no graph's."""
        return batch_tensors(arrays, self._device)


class HeadGraphs:
    """draft: draft tokens behind rows, by tensor work alone. Steps that no graph was captured for run eagerly."""

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
                    tokens = self._draft(one)
                self._graphs[one.graph] = graph, tokens
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
        graph, tokens = captured
        graph.replay()
        return tokens


class GraphedHead(ABC):
    """The parts of a DraftHead whose drafting is tensor work alone, captured where there are graphs."""

    def __init__(self) -> None:
        self._graphs = HeadGraphs(self._draft)

    @abstractmethod
    def _draft(self, rows: ComputedRows) -> torch.Tensor:
        """As DraftHead.draft."""

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    def capture(self, rows: Sequence[ComputedRows]) -> dict[int, float]:
        self._graphs.capture(rows)
        return self._graphs.seconds()

    @torch.inference_mode()
    def draft(self, rows: ComputedRows) -> torch.Tensor:
        return self._graphs.run(rows)
