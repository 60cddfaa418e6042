"""A draft model's whole draft, what it missed and all levels, as one CUDA graph. Engine thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.cuda_graphs import GraphShape, StepGraphs, graph_sizes
from slipstream.worker.input_batch import BatchBuilder, StepArrays
from slipstream.worker.memory_plan import MAX_DECODE_ROWS
from slipstream.worker.spec_decode.draft_batch import DraftBatches
from slipstream.worker.spec_decode.interface import Surroundings


class DraftGraphs:
    """draft: a batch -> what is drafted behind it, by tensor work alone.

    num_rows: tokens of one request that a graph has room for: those of one verification. refusal: why it cannot be
    captured.
    """

    def __init__(
        self,
        draft: Callable[[ForwardBatch], torch.Tensor],
        batches: DraftBatches,
        surroundings: Surroundings,
        num_rows: int,
        refusal: str | None = None,
    ) -> None:
        config, hardware = surroundings.config, surroundings.hardware
        self._draft = draft
        self._builder = BatchBuilder(batches.block_size, batches.num_positions, 1, hardware.device)
        sizes = graph_sizes(config.model.cuda_graphs, config.scheduler.max_num_seqs, hardware.device, refusal)
        shapes = [GraphShape(size * num_rows, num_rows, size) for size in sizes if size * num_rows <= MAX_DECODE_ROWS]
        self._graphs = StepGraphs(shapes, batches.max_blocks, batches.num_positions, draft, hardware.device)
        with torch.inference_mode():
            self._graphs.warm_up()
            self._graphs.capture()
            self._seconds = self._graphs.time_steps(shapes, surroundings.plan, lambda tokens: None)

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
        return self._builder.tensors(arrays)
