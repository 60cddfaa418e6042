"""The tensors that CUDA graphs read: a step is copied into them before its graph is replayed. Engine thread.

Steps are padded with tokens that write nothing (slot -1) and requests that attend to nothing (seq_len 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.nn.batch import ForwardBatch, GroupTensors
from slipstream.worker.graph_memory import InputSizes
from slipstream.worker.graph_shapes import StepShape
from slipstream.worker.host_copy import Staging
from slipstream.worker.input_batch import StepArrays
from slipstream.worker.memory_plan import MemoryPlan


@dataclass(frozen=True)
class _Layout:
    """Views for steps of one shape, number of requests and width of block tables, which decodes keep for many steps.

    host_tables, host_bytes: of the tables and of all that is copied, on the host. narrow, wide: on the device, the
    tables as they arrive and as the graphs read them.
    """

    shape: StepShape
    table_size: tuple[int, ...]
    host_tables: np.ndarray
    host_bytes: np.ndarray
    narrow: torch.Tensor
    wide: torch.Tensor


class StaticTensors:
    """The inputs of the graphs. One copy from the host brings them; a second copy, on the device, widens the block
    tables, which arrive as wide as the step needs.

    The host keeps the bytes of the last step, so that a decode that follows a decode writes only what differs.
    """

    def __init__(self, shapes: Sequence[StepShape], max_blocks: int, device: torch.device, num_groups: int = 1) -> None:
        sizes = InputSizes.of(shapes, max_blocks, num_groups)
        self._num_tokens, self._num_requests = sizes.num_tokens, sizes.num_requests
        num_columns, num_words, num_bytes = sizes.num_columns, sizes.num_words, sizes.arriving_bytes
        self._num_fixed_bytes = sizes.fixed_bytes
        # values of 64 bits; then 32-bit ones: starts and lengths, then tables
        self._arriving = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        words = self._arriving[: num_words * 8].view(torch.int64).view(num_columns, self._num_tokens)
        self.token_ids, self.positions, self.logits_indices, self.tree_mask = words[:4]
        self.slot_mappings = words[4:]  # of each KV group
        self.slot_mappings.fill_(-1)
        self.tree_mask.fill_(1)
        halves = self._arriving[num_words * 8 :].view(torch.int32)
        self.query_start_loc = halves[: self._num_requests + 1]
        torch.arange(self._num_requests + 1, out=self.query_start_loc)  # before the first step all requests are padding
        self.seq_lens = halves[self._num_requests + 1 : 2 * self._num_requests + 1]
        self._arriving_tables = halves[2 * self._num_requests + 1 :]
        self.block_tables = torch.zeros(num_groups, self._num_requests, max_blocks, dtype=torch.int32, device=device)
        self._staging = Staging(self._arriving)
        view = self._host = np.zeros(num_bytes, dtype=np.uint8)
        self._host_words = view[: num_words * 8].view(np.int64).reshape(num_columns, self._num_tokens)
        host_halves = view[num_words * 8 :].view(np.int32)
        self._host_starts = host_halves[: self._num_requests + 1]
        self._host_seq_lens = host_halves[self._num_requests + 1 : 2 * self._num_requests + 1]
        self._host_tables = host_halves[2 * self._num_requests + 1 :]
        self._layout: _Layout | None = None  # of the last step
        self._is_decode = False  # whether that was one

    def pretend(self, shape: StepShape, context: int, plan: MemoryPlan) -> None:
        """Fill the tensors for timing: each request of a shape has `context` cached tokens, or as many as fit, and the
        same number of rows."""
        count, rows = shape.num_requests, shape.num_tokens // shape.num_requests
        most, device = plan.max_model_len, self.block_tables.device
        context = max(0, min(context, most - rows))
        seq_len = min(context + rows, most)  # rows share the last position if max_model_len is very short
        width = -(-seq_len // plan.block_size)
        torch.arange(0, count * rows + 1, rows, out=self.query_start_loc[: count + 1])
        positions = context + torch.arange(count * rows, device=device) % rows
        self.positions[: count * rows] = positions.clamp(max=seq_len - 1)
        self.seq_lens[:count] = seq_len
        blocks = torch.arange(count * width, device=device) % plan.num_blocks
        self.block_tables[:, :count, :width] = blocks.view(count, -1)

    def clear(self) -> None:
        """Make all requests padding, as before the first step."""
        torch.arange(self._num_requests + 1, out=self.query_start_loc)
        for tensor in (self.positions, self.seq_lens, self.block_tables):
            tensor.zero_()

    def load(self, shape: StepShape, step: StepArrays) -> None:
        layout, last, was_decode = self._layout_of(shape, step), self._layout, self._is_decode
        self._layout, self._is_decode = layout, step.is_decode
        if layout is last and was_decode and step.is_decode:
            self._write_decode(step)
        else:
            self._write(shape, step)
        layout.host_tables[0] = step.block_tables
        if step.other_tables is not None:
            layout.host_tables[1:] = step.other_tables
        self._staging.send(layout.host_bytes)
        layout.wide.copy_(layout.narrow)

    def batch(self, shape: StepShape, num_logits: int, max_seq_len: int) -> ForwardBatch:
        """Of a shape, as its graph reads it; logits_indices: the first num_logits."""
        num_tokens, num_requests = shape.num_tokens, shape.num_requests
        tables, slots = self.block_tables[:, :num_requests], self.slot_mappings[:, :num_tokens]
        return ForwardBatch(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            query_start_loc=self.query_start_loc[: num_requests + 1],
            seq_lens=self.seq_lens[:num_requests],
            block_tables=tables[0],
            slot_mapping=slots[0],
            logits_indices=self.logits_indices[:num_logits],
            max_query_len=shape.max_query_len,
            max_seq_len=max_seq_len,
            num_decode_requests=shape.num_decodes,
            num_decode_tokens=shape.num_decode_tokens,
            max_decode_query_len=shape.max_decode_query_len,
            tree_mask=self.tree_mask[:num_tokens] if shape.is_tree else None,
            other_groups=tuple(map(GroupTensors, tables[1:], slots[1:])),
        )

    def _layout_of(self, shape: StepShape, step: StepArrays) -> _Layout:
        count, width = step.block_tables.shape
        size, last = (len(self.block_tables), count, width), self._layout
        if last is not None and last.shape == shape and last.table_size == size:
            return last
        num_entries = len(self.block_tables) * count * width
        num_bytes = self._num_fixed_bytes + num_entries * 4
        return _Layout(
            shape=shape,
            table_size=size,
            host_tables=self._host_tables[:num_entries].reshape(size),
            host_bytes=self._host[:num_bytes],
            narrow=self._arriving_tables[:num_entries].view(size),
            wide=self.block_tables[:, :count, :width],
        )

    def _write_decode(self, step: StepArrays) -> None:
        """After a decode of the same layout: starts, rows to sample, masks and padding are there."""
        count, words = len(step.token_ids), self._host_words
        words[0, :count] = step.token_ids
        words[1, :count] = step.positions
        words[4, :count] = step.slot_mapping
        if step.other_slots is not None:
            words[5:, :count] = step.other_slots
        self._host_seq_lens[:count] = step.seq_lens

    def _write(self, shape: StepShape, step: StepArrays) -> None:
        tree_mask = step.tree_mask if step.tree_mask is not None else _chain_masks(step) if shape.is_tree else None
        for row, (values, padding) in enumerate(
            (
                (step.token_ids, 0),
                (step.positions, 0),
                (step.logits_indices, 0),
                (() if tree_mask is None else tree_mask, 1),
                (step.slot_mapping, -1),
                *((slots, -1) for slots in (() if step.other_slots is None else step.other_slots)),
            )
        ):
            self._host_words[row, : len(values)] = values
            self._host_words[row, len(values) : shape.num_tokens] = padding
        count = len(step.seq_lens)
        self._host_starts[: count + 1] = step.query_start_loc
        # Padding requests have one token each, while tokens are left, and attend to nothing.
        padding_starts = step.query_start_loc[-1] + np.arange(1, self._num_requests - count + 1)
        self._host_starts[count + 1 :] = np.minimum(padding_starts, shape.num_tokens)
        self._host_seq_lens[:count] = step.seq_lens
        self._host_seq_lens[count:] = 0


def _chain_masks(step: StepArrays) -> np.ndarray:
    """Mask words of rows that attend to all earlier rows of their request."""
    starts = step.query_start_loc.astype(np.int64)
    rows = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    return (~np.uint64(0) >> (np.uint64(63) - rows.astype(np.uint64))).view(np.int64)
