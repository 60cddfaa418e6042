"""A whole draft, first pass and all levels, as one CUDA graph; steps that no graph holds run eagerly. Engine thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.nn.batch import ForwardBatch
from slipstream.runtime.batch import BatchBuilder, StepArrays
from slipstream.runtime.cuda_graphs import MAX_TOKENS, GraphShape, StepGraphs, graph_sizes
from slipstream.runtime.speculation.draft_batch import DraftBatches
from slipstream.runtime.speculation.proposer import Surroundings

DraftFunction = Callable[[ForwardBatch, torch.Tensor | None], torch.Tensor]


class DraftGraphs:
    """draft: a batch and the hidden states of its rows -> what is drafted, by tensor work alone.

    num_rows: tokens of one request that a graph has room for: those of one verification. hidden_width: of the hidden
    states, 0 if the drafter reads none. refusal: why it cannot be captured.
    """

    def __init__(
        self,
        draft: DraftFunction,
        batches: DraftBatches,
        surroundings: Surroundings,
        num_rows: int,
        hidden_width: int = 0,
        refusal: str | None = None,
    ) -> None:
        config, hardware = surroundings.config, surroundings.hardware
        self._draft = draft
        self._builder = BatchBuilder(batches.block_size, batches.num_positions, 1, hardware.device)
        sizes = graph_sizes(config.model.cuda_graphs, config.scheduler.max_num_seqs, hardware.device, refusal)
        shapes = [GraphShape(size * num_rows, num_rows, size) for size in sizes if size * num_rows <= MAX_TOKENS]
        most = max((shape.num_tokens for shape in shapes), default=0)
        self._hidden: torch.Tensor | None = None
        if hidden_width:
            self._hidden = torch.zeros(most, hidden_width, dtype=hardware.dtype, device=hardware.device)
        self._graphs = StepGraphs(shapes, batches.max_blocks, batches.num_positions, self._capture, hardware.device)
        with torch.inference_mode():
            self._graphs.warm_up()
            self._graphs.capture()

    def run(self, arrays: StepArrays, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: the model's, of which arrays.logits_indices names the batch's rows. Good until the next `run`."""
        shape = self._graphs.shape_for(arrays)
        if shape is None:
            batch = self.tensors(arrays)
            return self._draft(batch, None if hidden is None else hidden[batch.logits_indices])
        batch = self._graphs.load(shape, arrays)
        if hidden is not None:
            assert self._hidden is not None
            torch.index_select(hidden, 0, batch.logits_indices, out=self._hidden[: len(batch.logits_indices)])
        return self._graphs.replay(shape)

    def tensors(self, arrays: StepArrays) -> ForwardBatch:
        """For a draft that is no graph's."""
        return self._builder.tensors(arrays)

    def _capture(self, batch: ForwardBatch) -> torch.Tensor:
        return self._draft(batch, None if self._hidden is None else self._hidden[: batch.token_ids.shape[0]])
