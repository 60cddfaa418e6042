"""Whole drafts as CUDA graphs: all levels of a draft model, and of a head after each verification.

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
from slipstream.worker.input_batch import StepArrays, batch_tensors, padding_batch
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.load_target import in_inference_mode
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.draft_batch import DraftBatches
from slipstream.worker.spec_decode.interface import DraftReadiness, SpeculatorContext
from slipstream.worker.static_tensors import GraphInputs


class DraftGraphs:
    """draft: a batch -> draft tokens after it, without host work.

    num_rows: tokens per request in a graph: those of one verification. refusal: why it cannot be captured, or None.
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
        self._graphs = StepGraphs(
            shapes, GraphInputs(batches.max_blocks, batches.num_positions, hardware.device), draft
        )
        with torch.inference_mode():
            self._graphs.warm_up()
            if not shapes:
                draft(padding_batch(num_rows, batches.max_blocks, hardware.device))  # to compile its kernels
            self._graphs.capture()
            self._seconds = self._graphs.time_steps(shapes, context.plan, lambda tokens: None)

    def run(self, arrays: StepArrays) -> torch.Tensor:
        """Valid until the next `run`."""
        shape = self._graphs.shape_for(arrays)
        if shape is None:
            return self._draft(self.tensors(arrays))
        self._graphs.load(shape, arrays)
        return self._graphs.replay(shape)

    def seconds(self) -> dict[int, float]:
        """Seconds of a draft by number of requests."""
        return {shape.num_requests: took for shape, took in self._seconds.items()}

    def tensors(self, arrays: StepArrays) -> ForwardBatch:
        """The tensors of a draft that runs without a graph."""
        return batch_tensors(arrays, self._device)


class HeadGraphs:
    """draft: rows -> draft tokens after them, without host work. Steps without a graph run eagerly."""

    def __init__(self, draft: Callable[[ComputedRows], torch.Tensor]) -> None:
        self._draft = draft
        self._graphs: dict[GraphShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self, rows: Sequence[ComputedRows]) -> None:
        """rows: the static tensors of the verification graphs; of other steps drafting is only run."""
        for one in rows:
            one.hidden.zero_()  # nothing has been written to it yet
            self._draft(one)  # compiles kernels, lets libraries choose theirs
        captured = [one for one in rows if one.graph is not None]
        if not captured:
            return
        pool = torch.cuda.graph_pool_handle()
        with uncollected():
            for one in reversed(captured):
                assert one.graph is not None
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    tokens = self._draft(one)
                self._graphs[one.graph] = graph, tokens
        torch.cuda.synchronize()

    def seconds(self) -> dict[int, float]:
        """Seconds of drafting by number of requests, after the largest verification of that many."""
        largest = {shape.num_requests: graph for shape, (graph, _) in reversed(self._graphs.items())}
        return {num_requests: seconds_of(graph.replay) for num_requests, graph in largest.items()}

    def run(self, rows: ComputedRows) -> torch.Tensor:
        """Valid until the next `run`."""
        captured = None if rows.graph is None or rows.accepted is None else self._graphs.get(rows.graph)
        if captured is None:
            return self._draft(rows)
        graph, tokens = captured
        graph.replay()
        return tokens


class GraphedHead(ABC):
    """Base of a DraftHead that drafts without host work, so that drafting can be captured.

    As it stands, it keeps nothing of a request: what it drafts from is the hidden state of the last token.
    """

    reads_all_rows = False
    num_scratch_slots = 0

    def __init__(self) -> None:
        self._graphs = HeadGraphs(self._draft)

    @abstractmethod
    def _draft(self, rows: ComputedRows) -> torch.Tensor:
        """See DraftHead.draft."""

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    def update_kv(self, rows: ComputedRows) -> None:
        return  # it has no KV cache

    def after_step(self, request: RequestState, start: int, count: int, is_updated: bool) -> DraftReadiness:
        return DraftReadiness.READY if is_updated else DraftReadiness.BEHIND

    def forget(self, sequence_ids: Sequence[int]) -> None:
        return

    def capture(self, rows: Sequence[ComputedRows]) -> dict[int, float]:
        self._graphs.capture(rows)
        return self._graphs.seconds()

    @in_inference_mode
    def draft(self, rows: ComputedRows) -> torch.Tensor:
        return self._graphs.run(rows)
