"""The tensors that CUDA graphs read: a step is copied into them before its graph is replayed. Engine thread.

Steps are padded with tokens that write nothing (slot -1) and requests that attend to nothing (seq_len 0). The first
kernel of each graph completes them: the host launches one copy and the graph, and nothing between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slipstream_kernels import ops

from slipstream.nn.batch import ForwardBatch, GroupTensors
from slipstream.worker.graph_memory import InputSizes
from slipstream.worker.graph_shapes import StepShape
from slipstream.worker.host_copy import Staging
from slipstream.worker.input_batch import StepArrays
from slipstream.worker.memory_plan import MemoryPlan


@dataclass(frozen=True)
class GraphInputs:
    """What all graphs of a model share. max_blocks: width of a block table. max_seq_len: the longest sequence.

    num_groups: of KV. drawn: [N] int64, static, where pending tokens of steps lie; None: no step has any.
    """

    max_blocks: int
    max_seq_len: int
    device: torch.device
    num_groups: int = 1
    drawn: torch.Tensor | None = None


@dataclass(slots=True)
class _Layout:
    """Views for steps of one shape, number of requests and width of block tables, which decodes keep for many steps.

    host_tables, host_bytes: of the tables and of all that is copied.
    """

    shape: StepShape
    table_size: tuple[int, ...]
    host_tables: np.ndarray
    host_bytes: np.ndarray


class StaticTensors:
    """The inputs of the graphs. One copy from the host brings them. `unpack`, which graphs begin with, widens the block
    tables, which arrive as wide as the step needs, and fills in tokens that the host does not know.

    The host keeps the bytes of the last step, so that a decode that follows a decode writes only what differs.
    """

    def __init__(self, shapes: Sequence[StepShape], inputs: GraphInputs) -> None:
        self._inputs, device = inputs, inputs.device
        max_blocks, num_groups = inputs.max_blocks, inputs.num_groups
        sizes = InputSizes.of(shapes, max_blocks, num_groups)
        self._num_tokens, self._num_requests = sizes.num_tokens, sizes.num_requests
        num_columns, num_words, num_bytes = sizes.num_columns, sizes.num_words, sizes.arriving_bytes
        self._num_fixed_bytes = sizes.fixed_bytes
        # values of 64 bits; then 32-bit ones: starts and lengths, the tables' rows and width, the tables
        self._arriving = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        words = self._arriving[: num_words * 8].view(torch.int64).view(num_columns, self._num_tokens)
        self.token_ids, self.positions, self.logits_indices, self.tree_mask, self._sources = words[:5]
        self.slot_mappings = words[5:]  # of each KV group
        words[4:].fill_(-1)  # nothing is pending, nothing is written
        self.tree_mask.fill_(1)
        halves = self._arriving[num_words * 8 :].view(torch.int32)
        self.query_start_loc = halves[: self._num_requests + 1]
        torch.arange(self._num_requests + 1, out=self.query_start_loc)  # before the first step all requests are padding
        self.seq_lens = halves[self._num_requests + 1 : 2 * self._num_requests + 1]
        self._table_size = halves[2 * self._num_requests + 1 : 2 * self._num_requests + 3]
        self._arriving_tables = halves[2 * self._num_requests + 3 :]
        self.drawn = inputs.drawn if inputs.drawn is not None else self.token_ids.new_zeros(1)
        self.block_tables = torch.zeros(num_groups, self._num_requests, max_blocks, dtype=torch.int32, device=device)
        self._staging = Staging(self._arriving)
        view = self._host = np.zeros(num_bytes, dtype=np.uint8)
        self._host_words = view[: num_words * 8].view(np.int64).reshape(num_columns, self._num_tokens)
        host_halves = view[num_words * 8 :].view(np.int32)
        self._host_starts = host_halves[: self._num_requests + 1]
        self._host_seq_lens = host_halves[self._num_requests + 1 : 2 * self._num_requests + 1]
        self._host_table_size = host_halves[2 * self._num_requests + 1 : 2 * self._num_requests + 3]
        self._host_tables = host_halves[2 * self._num_requests + 3 :]
        self._order = np.arange(self._num_tokens + 1, dtype=np.int32)
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
        for tensor in (self.positions, self.seq_lens, self.block_tables, self._table_size):
            tensor.zero_()
        self._sources.fill_(-1)

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

    def unpack(self, shape: StepShape) -> None:
        """Complete the last loaded step on the device, without the host; does nothing if none is loaded."""
        num_tokens, tables = shape.num_tokens, self.block_tables[:, : shape.num_requests]
        arrived = ops.ArrivedInputs(self._table_size, self._arriving_tables, self._sources[:num_tokens])
        ops.unpack_step_inputs(arrived, tables, self.token_ids[:num_tokens], self.drawn)

    def batch(self, shape: StepShape, num_logits: int) -> ForwardBatch:
        """The batch of a shape, as its graph reads it; logits_indices: the first num_logits."""
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
            max_seq_len=self._inputs.max_seq_len,
            num_decode_requests=shape.num_decodes,
            num_decode_tokens=shape.num_decode_tokens,
            max_decode_query_len=shape.max_decode_query_len,
            tree_mask=self.tree_mask[:num_tokens] if shape.is_tree else None,
            other_groups=tuple(map(GroupTensors, tables[1:], slots[1:])),
        )

    def _layout_of(self, shape: StepShape, step: StepArrays) -> _Layout:
        count, width = step.block_tables.shape
        num_groups, last = self._inputs.num_groups, self._layout
        size = num_groups, count, width
        if last is not None and last.shape == shape and last.table_size == size:
            return last
        num_entries = num_groups * count * width
        num_bytes = self._num_fixed_bytes + num_entries * 4
        return _Layout(
            shape=shape,
            table_size=size,
            host_tables=self._host_tables[:num_entries].reshape(size),
            host_bytes=self._host[:num_bytes],
        )

    def _write_decode(self, step: StepArrays) -> None:
        """After a decode of the same layout: starts, rows to sample, masks and padding are there."""
        count, words = len(step.token_ids), self._host_words
        words[0, :count] = step.token_ids
        words[1, :count] = step.positions
        words[5, :count] = step.slot_mapping
        self._write_sources(step, count)
        if step.other_slots is not None:
            words[6:, :count] = step.other_slots
        self._host_seq_lens[:count] = step.seq_lens

    def _write(self, shape: StepShape, step: StepArrays) -> None:
        words, num_tokens, num_logits = self._host_words, len(step.token_ids), len(step.logits_indices)
        end = shape.num_tokens
        words[:3, num_logits:end] = 0
        words[0, :num_tokens] = step.token_ids
        words[1, :num_tokens] = step.positions
        words[2, :num_logits] = step.logits_indices
        if shape.is_tree:
            words[3] = 1
            tree_mask = _chain_masks(step) if step.tree_mask is None else step.tree_mask
            words[3, : len(tree_mask)] = tree_mask
        words[5, :num_tokens] = step.slot_mapping
        if step.other_slots is not None:
            words[6:, :num_tokens] = step.other_slots
        words[5:, num_tokens:end] = -1
        self._write_sources(step, end)
        self._host_table_size[:] = step.block_tables.shape
        count = len(step.seq_lens)
        self._host_starts[: count + 1] = step.query_start_loc
        # Padding requests have one token each, while tokens are left, and attend to nothing.
        padding = self._host_starts[count + 1 :]
        num_single = min(len(padding), end - num_tokens)
        padding[:num_single] = self._order[num_tokens + 1 : num_tokens + 1 + num_single]
        padding[num_single:] = end
        self._host_seq_lens[:count] = step.seq_lens
        self._host_seq_lens[count:] = 0

    def _write_sources(self, step: StepArrays, end: int) -> None:
        """Where each token before `end` lies among the drawn ones; -1: the host knows it."""
        pending, sources = step.pending, self._host_words[4]
        count = len(pending.places)
        if not pending.are_first:
            sources[:end] = -1
            sources[pending.places] = pending.sources
            return
        sources[:count] = pending.sources
        if count < end:
            sources[count:end] = -1


def _chain_masks(step: StepArrays) -> np.ndarray:
    """Mask words of rows that attend to all earlier rows of their request."""
    starts = step.query_start_loc.astype(np.int64)
    rows = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    return (~np.uint64(0) >> (np.uint64(63) - rows.astype(np.uint64))).view(np.int64)
