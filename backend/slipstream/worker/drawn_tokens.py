"""The tokens that a step has drawn, where the CUDA graph of the next one takes those that the host does not know yet.

Engine thread. All graphs of a runner read one tensor at their beginning. Graphs that draw write it at their end, and
requests whose logits nobody edits draw into it behind the graphs that do not. The step's copy to the host is launched
before the next one writes, so whatever is overwritten has been read.
"""

from __future__ import annotations

import torch
from slipstream_kernels import ops

from slipstream.worker.input_batch import PendingRows, SampledTokens, fill_pending
from slipstream.worker.launched_step import StepTensors
from slipstream.worker.sample.draws import StaticDraws


class DrawnTokens:
    """token_ids: [capacity] int64, static. capacity: rows of the largest step. draws: by what the rows of requests draw
    whose logits nobody edits. num_drawn: such rows of the largest step without drafts, and of the largest graph."""

    def __init__(self, capacity: int, device: torch.device, num_drawn: int = 0) -> None:
        self.token_ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.draws = StaticDraws(num_drawn, device)
        self._views: dict[int, torch.Tensor] = {}  # by number of rows

    def first(self, count: int) -> torch.Tensor:
        """The first `count` rows, always the same view: making one takes 7 us of a step."""
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self.token_ids[:count]
        return view

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The ids of the highest logits [rows, vocab], which lie here: [rows] int64."""
        return ops.greedy(logits, self.first(logits.shape[0]))

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens drawn by `draws`, which lie here. logits: [rows, vocab]; positions: [rows] int64, of the rows."""
        count = logits.shape[0]
        return ops.sample(logits, *self.draws.first(count), positions, self.first(count))

    def give(self, tensors: StepTensors, pending: PendingRows, sampled: SampledTokens | None) -> None:
        """Bring tokens that were never on the host to a step: into its own batch, or to where its graph takes them."""
        if not len(pending.places):
            return
        assert sampled is not None
        if tensors.has_graph:
            own = self.first(sampled.token_ids.shape[0])
            if own is not sampled.token_ids:
                own.copy_(sampled.token_ids)
        if tensors.has_own_batch:
            fill_pending(tensors.batch.token_ids, pending, sampled)
