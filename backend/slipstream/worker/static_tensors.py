"""What captured steps read: tensors that stay where they are, and how a step gets into them. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from slipstream.worker.input_batch import StepArrays
from slipstream.worker.memory_plan import MemoryPlan


class StepShape(Protocol):
    """What a graph has room for, and how a step is laid out in it."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def is_tree(self) -> bool: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def num_decode_tokens(self) -> int: ...
    @property
    def max_decode_query_len(self) -> int: ...
    @property
    def num_logits(self) -> int:
        """How many of logits_indices its forward pass reads."""
        ...

    def holds(self, step: StepArrays) -> bool: ...

    def spread(self, step: StepArrays) -> StepArrays:
        """The step as it lies in the graph's tensors, but for padding behind it."""
        ...


class StaticTensors:
    """What the graphs read. They arrive by one copy from the host; block tables, which it brings as wide as the step
    needs them, are spread by one on the device."""

    def __init__(self, shapes: Sequence[StepShape], max_blocks: int, device: torch.device) -> None:
        self._num_tokens = max((shape.num_tokens for shape in shapes), default=0)
        self._num_requests = max((shape.num_requests for shape in shapes), default=0)
        self._num_words = 5 * self._num_tokens  # of 64 bits; then 32-bit ones: starts and lengths, then tables
        self._num_fixed_bytes = self._num_words * 8 + (2 * self._num_requests + 1) * 4
        num_bytes = self._num_fixed_bytes + self._num_requests * max_blocks * 4
        self._arriving = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        words = self._arriving[: self._num_words * 8].view(torch.int64).view(5, self._num_tokens)
        self.token_ids, self.positions, self.slot_mapping, self.logits_indices, self.tree_mask = words
        self.slot_mapping.fill_(-1)
        self.tree_mask.fill_(1)
        halves = self._arriving[self._num_words * 8 :].view(torch.int32)
        self.query_start_loc = halves[: self._num_requests + 1]
        torch.arange(self._num_requests + 1, out=self.query_start_loc)  # before a first step all requests pad
        self.seq_lens = halves[self._num_requests + 1 : 2 * self._num_requests + 1]
        self._arriving_tables = halves[2 * self._num_requests + 1 :]
        self.block_tables = torch.zeros(self._num_requests, max_blocks, dtype=torch.int32, device=device)

    def pretend(self, shape: StepShape, context: int, plan: MemoryPlan) -> None:
        """As if each request of a shape had `context` tokens in the cache, or as many as fit, and its part of the
        rows."""
        count, rows = shape.num_requests, shape.num_tokens // shape.num_requests
        most, device = plan.max_model_len, self.block_tables.device
        context = max(0, min(context, most - rows))
        seq_len = min(context + rows, most)  # a very short model's last place is for several rows
        width = -(-seq_len // plan.block_size)
        torch.arange(0, count * rows + 1, rows, out=self.query_start_loc[: count + 1])
        places = context + torch.arange(count * rows, device=device) % rows
        self.positions[: count * rows] = places.clamp(max=seq_len - 1)
        self.seq_lens[:count] = seq_len
        self.block_tables[:count, :width] = (torch.arange(count * width, device=device) % plan.num_blocks).view(
            count, -1
        )

    def clear(self) -> None:
        """All requests pad, as before a first step."""
        torch.arange(self._num_requests + 1, out=self.query_start_loc)
        for tensor in (self.positions, self.seq_lens, self.block_tables):
            tensor.zero_()

    def load(self, shape: StepShape, step: StepArrays) -> None:
        count, width = step.block_tables.shape
        num_bytes = self._num_fixed_bytes + count * width * 4
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._arriving.is_cuda)
        view = staging.numpy()
        words = view[: self._num_words * 8].view(np.int64).reshape(5, self._num_tokens)
        tree_mask = step.tree_mask if step.tree_mask is not None else _chain_masks(step) if shape.is_tree else None
        for row, (values, padding) in enumerate(
            (
                (step.token_ids, 0),
                (step.positions, 0),
                (step.slot_mapping, -1),
                (step.logits_indices, 0),
                (() if tree_mask is None else tree_mask, 1),
            )
        ):
            words[row, : len(values)] = values
            words[row, len(values) : shape.num_tokens] = padding
        halves = view[self._num_words * 8 :].view(np.int32)
        starts, seq_lens = halves[: self._num_requests + 1], halves[self._num_requests + 1 : 2 * self._num_requests + 1]
        starts[: count + 1] = step.query_start_loc
        # Requests that pad have a token each, as long as there are any, and see nothing.
        padding_starts = step.query_start_loc[-1] + np.arange(1, self._num_requests - count + 1)
        starts[count + 1 :] = np.minimum(padding_starts, shape.num_tokens)
        seq_lens[:count] = step.seq_lens
        seq_lens[count:] = 0
        halves[2 * self._num_requests + 1 :].reshape(count, width)[:] = step.block_tables
        self._arriving[:num_bytes].copy_(staging, non_blocking=True)
        self.block_tables[:count, :width].copy_(self._arriving_tables[: count * width].view(count, width))


def _chain_masks(step: StepArrays) -> np.ndarray:
    """The mask words of rows that see all rows before them."""
    starts = step.query_start_loc.astype(np.int64)
    rows = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    return (~np.uint64(0) >> (np.uint64(63) - rows.astype(np.uint64))).view(np.int64)
