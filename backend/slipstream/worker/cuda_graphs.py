"""Steps captured as CUDA graphs at start: one launch in place of some hundred. Engine thread.

A graph has a capacity of tokens and requests and runs every step that fits: decodes, verifications, short prompts.
Lengths are data. Steps are padded with tokens that write nothing (slot -1) and requests that attend to nothing
(seq_len 0). All graphs read the same static tensors. Knows tensors only: no requests, no model.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from slipstream.nn.batch import ForwardBatch, GroupTensors
from slipstream.worker.graph_memory import InputSizes
from slipstream.worker.graph_shapes import StepShape
from slipstream.worker.input_batch import StepArrays
from slipstream.worker.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)

# A step is captured if its kernels take at most this many times as long as their launches.
LAUNCH_BOUND = 1.3
# Cached tokens per request while steps are timed.
TIMED_CONTEXT = 1024

Shape = TypeVar("Shape", bound=StepShape)


@dataclass(frozen=True)
class _Layout:
    """Views for steps of one shape, number of requests and width of block tables, which decodes keep for many steps.

    host_tables, host_bytes: of the tables and of all that is copied, on the host. arriving: its place on the device.
    narrow, wide: there, the tables as they arrive and as the graphs read them.
    """

    shape: StepShape
    table_size: tuple[int, ...]
    host_tables: np.ndarray
    host_bytes: torch.Tensor
    arriving: torch.Tensor
    narrow: torch.Tensor
    wide: torch.Tensor


class StaticTensors:
    """The inputs of the graphs. One copy from the host brings them; a second copy, on the device, widens the block
    tables, which arrive as wide as the step needs.

    The host keeps the bytes of the last step, so that a decode that follows a decode writes only what differs. The
    device copies from pinned memory that is each step's own: nothing that it may still read is written again.
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
        self._host = torch.zeros(num_bytes, dtype=torch.uint8)
        view = self._host.numpy()
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
        staging = torch.empty(len(layout.host_bytes), dtype=torch.uint8, pin_memory=self._arriving.is_cuda)
        staging.copy_(layout.host_bytes)
        layout.arriving.copy_(staging, non_blocking=True)
        layout.wide.copy_(layout.narrow)

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
            arriving=self._arriving[:num_bytes],
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


class Drawn(NamedTuple):
    """Of a decode: logits [num_tokens, vocab], which may be changed, and the ids of the highest, [num_tokens] int64."""

    logits: torch.Tensor
    token_ids: torch.Tensor


class StepGraphs(Generic[Shape]):
    """forward: a batch of static tensors -> hidden states; its kernels must depend on the shape only.

    draw: of the hidden states of decodes, captured behind them."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        max_blocks: int,
        max_seq_len: int,
        forward: Callable[[ForwardBatch], torch.Tensor],
        device: torch.device,
        num_groups: int = 1,
        draw: Callable[[torch.Tensor], Drawn] | None = None,
    ) -> None:
        self._shapes = list(shapes)
        self._forward, self._draw = forward, draw
        self._drawn: dict[Shape, Drawn] = {}
        self._max_seq_len = max_seq_len
        self._static = StaticTensors(self._shapes, max_blocks, device, num_groups)
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if shapes and device.type == "cuda" else None
        self._last_batch: tuple[Shape, int, ForwardBatch] | None = None
        self._decode_shapes: dict[int, Shape | None] = {}  # by number of requests, as asked for

    @property
    def shapes(self) -> Sequence[Shape]:
        return self._shapes

    def tensors(self, shape: Shape) -> tuple[ForwardBatch, torch.Tensor]:
        """The input and output tensors of a captured graph."""
        return self._batch(shape, shape.num_tokens), self._graphs[shape][1]

    def shape_for(self, step: StepArrays) -> Shape | None:
        """The smallest graph that fits the step, or None."""
        if not step.is_decode:
            return self._smallest_for(step)
        count = len(step.token_ids)  # all that matters of a decode
        if count not in self._decode_shapes:
            self._decode_shapes[count] = self._smallest_for(step)
        return self._decode_shapes[count]

    def _smallest_for(self, step: StepArrays) -> Shape | None:
        return next((shape for shape in self._shapes if shape.holds(step)), None)

    def warm_up(self) -> None:
        """Run each shape once without a graph, to compile kernels and initialise libraries."""
        for shape in reversed(self._shapes):
            self._run(shape)

    def _run(self, shape: Shape) -> tuple[torch.Tensor, Drawn | None]:
        hidden = self._forward(self._batch(shape, shape.num_logits))
        return hidden, self._draw(hidden) if self._draw is not None and shape.max_query_len == 1 else None

    def keep_launch_bound(self, any_of: Callable[[bool], bool]) -> None:
        """Warm up, and drop the shapes whose kernels take longer than LAUNCH_BOUND times their launches.

        any_of: several ranks wait for each other's sums, so only the one that launches last sees what bounds them all:
        its word keeps a shape."""
        kept: list[Shape] = []
        for _, group in groupby(self._shapes, lambda shape: shape.num_tokens):
            shapes = list(group)
            for shape in shapes:
                self._forward(self._batch(shape, shape.num_logits))
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._forward(self._batch(shapes[0], shapes[0].num_logits))
            launched = time.perf_counter()
            torch.cuda.synchronize()
            if not any_of(time.perf_counter() - start <= LAUNCH_BOUND * (launched - start)):
                break
            kept += shapes
        self._shapes = kept
        self._decode_shapes.clear()

    def capture(self, beside: StepGraphs[Any] | None = None) -> None:
        """Record all graphs, the largest first, in one memory pool. The caller holds inference_mode.

        beside: other graphs, whose memory pool is shared, because no two graphs run at once.
        """
        if not self._shapes:
            return
        start = time.perf_counter()
        if beside is not None and beside._pool is not None:
            self._pool = beside._pool
        with uncollected():
            for shape in reversed(self._shapes):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    hidden, drawn = self._run(shape)
                self._graphs[shape] = (graph, hidden)
                if drawn is not None:
                    self._drawn[shape] = drawn._replace(logits=_unowned(drawn.logits))
                    del drawn  # for the next graph to have the memory of the logits
        torch.cuda.synchronize()
        decodes = [str(shape.num_requests) for shape in self._shapes if shape.max_query_len == 1]
        logger.info(
            "captured %d graphs in %.2f s: %sothers of up to %d tokens",
            len(self._shapes), time.perf_counter() - start,
            f"decode steps of {', '.join(decodes)} requests, " if decodes else "", self._shapes[-1].num_tokens,
        )  # fmt: skip

    def time_steps(
        self, shapes: Sequence[Shape], plan: MemoryPlan, after: Callable[[torch.Tensor], object]
    ) -> dict[Shape, float]:
        """Seconds of steps by shape, with TIMED_CONTEXT cached tokens per request, or as many as fit.

        after: called with the output of every step whose graph does not draw, and timed with it. The KV pool must
        still be empty."""
        seconds = {}
        for shape in shapes:
            self._static.pretend(shape, TIMED_CONTEXT, plan)
            seconds[shape] = seconds_of(partial(self._replay_and, shape, after))
        self._static.clear()
        return seconds

    def _replay_and(self, shape: Shape, after: Callable[[torch.Tensor], object]) -> None:
        hidden = self.replay(shape)
        if shape not in self._drawn:
            after(hidden)

    def drop(self, shapes: Collection[Shape]) -> None:
        self._shapes = [shape for shape in self._shapes if shape not in shapes]
        self._decode_shapes.clear()
        for shape in shapes:
            del self._graphs[shape]
            self._drawn.pop(shape, None)

    def load(self, shape: Shape, step: StepArrays) -> ForwardBatch:
        """Copy a step into the static tensors. The batch has the graph's shape, except logits_indices, which has the
        step's. Valid until the next `load`."""
        self._static.load(shape, shape.spread(step))
        num_logits = len(step.logits_indices)
        if self._last_batch is None or self._last_batch[:2] != (shape, num_logits):
            self._last_batch = shape, num_logits, self._batch(shape, num_logits)
        return self._last_batch[2]

    def replay(self, shape: Shape) -> torch.Tensor:
        """The output of `forward`; valid until the next replay of any shape."""
        graph, hidden = self._graphs[shape]
        graph.replay()
        return hidden

    def drawn(self, shape: Shape) -> Drawn | None:
        """What the last replay has drawn, if it was of this shape and its graph draws; valid as long as its output."""
        return self._drawn.get(shape)

    def _batch(self, shape: Shape, num_logits: int) -> ForwardBatch:
        static, num_tokens, num_requests = self._static, shape.num_tokens, shape.num_requests
        tables, slots = static.block_tables[:, :num_requests], static.slot_mappings[:, :num_tokens]
        return ForwardBatch(
            token_ids=static.token_ids[:num_tokens],
            positions=static.positions[:num_tokens],
            query_start_loc=static.query_start_loc[: num_requests + 1],
            seq_lens=static.seq_lens[:num_requests],
            block_tables=tables[0],
            slot_mapping=slots[0],
            logits_indices=static.logits_indices[:num_logits],
            max_query_len=shape.max_query_len,
            max_seq_len=self._max_seq_len,
            num_decode_requests=shape.num_decodes,
            num_decode_tokens=shape.num_decode_tokens,
            max_decode_query_len=shape.max_decode_query_len,
            tree_mask=static.tree_mask[:num_tokens] if shape.is_tree else None,
            other_groups=tuple(map(GroupTensors, tables[1:], slots[1:])),
        )


class _Bytes:
    """Of a storage on the device, as torch.as_tensor takes them without owning them."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        data, shape = (storage.data_ptr(), False), (storage.nbytes(),)
        self.__cuda_array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 2}


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory of a graph, which others of its pool may have, too: logits of a graph for each number of requests
    would hold a gigabyte."""
    memory = torch.as_tensor(_Bytes(tensor.untyped_storage()), device=tensor.device).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def seconds_of(run: Callable[[], object]) -> float:
    """Device time of a second run."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection: freeing another engine's graphs or pinned memory makes a capture fail."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
