"""Steps captured as CUDA graphs at start: one launch in place of some hundred. Engine thread.

A graph has room for a number of tokens and of requests, and takes every step that fits: decode, verification of drafts,
short prompts among them. Lengths are data; what is left over is padded with tokens that write nothing (slot -1) and
requests that see nothing (seq_len 0). All graphs read the same static tensors. Knows tensors only: no requests, no
model.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import torch

from slipstream.core.errors import ConfigError
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch
from slipstream.worker.input_batch import StepArrays
from slipstream.worker.memory_plan import MAX_DECODE_ROWS, MemoryPlan
from slipstream.worker.static_tensors import StaticTensors, StepShape

logger = logging.getLogger(__name__)

# Numbers of requests to capture for. Up to 64 a row costs little beside the weights; above, steps of 32 at most.
DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Kernels that take up to so many times as long as their launches are worth a graph: it also spares the engine's thread.
LAUNCH_BOUND = 1.3
# The fewest tokens of a step with a prompt that is worth a graph of its own.
MIN_PROMPT_TOKENS = 16
# Tokens of each request in the cache where steps are timed.
TIMED_CONTEXT = 1024
# Of a graph's seconds, below which a larger one takes its place.
LEAST_GAIN = 0.95


Shape = TypeVar("Shape", bound=StepShape)


@dataclass(frozen=True, order=True)
class GraphShape:
    """What a graph has room for. max_query_len: tokens of one request; is_tree: drafts may be trees."""

    num_tokens: int
    max_query_len: int
    num_requests: int
    is_tree: bool = False

    @property
    def is_verification(self) -> bool:
        """Made for drafts, though short prompts may fit in as well."""
        return self.is_tree or 1 < self.max_query_len < MAX_DECODE_QUERY_LEN

    def holds(self, step: StepArrays) -> bool:
        """Prompts of more than MAX_DECODE_QUERY_LEN tokens never fit: prompt_shapes.py is for them."""
        return (
            len(step.token_ids) <= self.num_tokens
            and len(step.seq_lens) <= self.num_requests
            and step.max_query_len <= self.max_query_len
            and step.num_decode_requests == len(step.seq_lens)
            and (self.is_tree or step.tree_mask is None)
        )

    def covers(self, other: GraphShape) -> bool:
        """Whether every step that fits into another fits into this one."""
        sides = zip(astuple(self), astuple(other))
        return all(own >= its for own, its in sides)

    @property
    def num_decodes(self) -> int:
        return self.num_requests

    @property
    def num_decode_tokens(self) -> int:
        return self.num_tokens

    @property
    def max_decode_query_len(self) -> int:
        return self.max_query_len

    @property
    def num_logits(self) -> int:
        return 1

    def spread(self, step: StepArrays) -> StepArrays:
        return step


def graph_sizes(wanted: str, max_num_seqs: int, device: torch.device, refusal: str | None = None) -> tuple[int, ...]:
    """Numbers of requests to capture for, ascending. wanted: "auto", "off" or a list like "1,2,4"; a CPU has none.

    refusal: why this model's steps cannot be captured; then "auto" has none, and a list raises ConfigError.
    """
    if wanted == "off" or device.type != "cuda":
        return ()
    if refusal is not None:
        if wanted != "auto":
            raise ConfigError("cuda_graphs", wanted, f"accepted: auto or off, because {refusal}")
        logger.warning("no CUDA graphs: %s", refusal)
        return ()
    if wanted != "auto":
        return tuple(sorted({int(size) for size in wanted.split(",")}))
    largest = min(max_num_seqs, DEFAULT_SIZES[-1])
    return (*(size for size in DEFAULT_SIZES if size < largest), largest)


@dataclass(frozen=True)
class DraftForms:
    """num_drafts: the most of a request, 0 without speculation. has_trees: they may be trees. are_ragged: requests of a
    step have as many as there are good ones; else as many as the planner gives, all the same. reads_all_rows: a drafter
    reads the hidden states of all tokens of a prompt."""

    num_drafts: int = 0
    has_trees: bool = False
    are_ragged: bool = True
    reads_all_rows: bool = False


NO_DRAFTS = DraftForms()


def graph_shapes(sizes: Sequence[int], drafts: DraftForms = NO_DRAFTS) -> list[GraphShape]:
    """The graphs for these numbers of requests, ascending: decode, verification, and steps with short prompts."""
    num_drafts = drafts.num_drafts
    shapes = {GraphShape(size, 1, size) for size in sizes}
    lengths = {1 + num_drafts, *(length for length in (2, 4, 8, 16, 32) if length <= num_drafts)} if num_drafts else ()
    for size in sizes:
        for length in lengths:  # ragged ones: on average
            if size * length <= MAX_DECODE_ROWS:
                longest = 1 + num_drafts if drafts.are_ragged else length
                shapes.add(GraphShape(size * length, longest, size, drafts.has_trees))
    for size in _thinned(sizes):
        num_tokens = MIN_PROMPT_TOKENS
        while num_tokens <= min(MAX_DECODE_ROWS, size * MAX_DECODE_QUERY_LEN):
            if num_tokens > size:
                shapes.add(GraphShape(num_tokens, MAX_DECODE_QUERY_LEN, size))
            num_tokens *= 2
    return sorted(shapes)


def slower_than_larger(seconds: Mapping[GraphShape, float]) -> list[GraphShape]:
    """Verifications for which a larger graph takes less time: of 448 rows one took 15.7 ms on one H200, of 512 11.8,
    because a library chose badly for a product."""
    return [
        shape
        for shape, took in seconds.items()
        if shape.is_verification
        and any(less < LEAST_GAIN * took and larger.covers(shape) for larger, less in seconds.items())
    ]


def _thinned(sizes: Sequence[int]) -> list[int]:
    """The sizes that are at least four times the one before, and the largest."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= 4 * kept[-1] or size == sizes[-1]:
            kept.append(size)
    return kept


class StepGraphs(Generic[Shape]):
    """forward: a batch of static tensors -> hidden states, whose kernels depend on the shape alone."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        max_blocks: int,
        max_seq_len: int,
        forward: Callable[[ForwardBatch], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._shapes = list(shapes)
        self._forward = forward
        self._max_seq_len = max_seq_len
        self._static = StaticTensors(self._shapes, max_blocks, device)
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if shapes and device.type == "cuda" else None

    @property
    def shapes(self) -> Sequence[Shape]:
        return self._shapes

    def tensors(self, shape: Shape) -> tuple[ForwardBatch, torch.Tensor]:
        """What a captured graph reads, and the hidden states that it writes."""
        return self._batch(shape, shape.num_tokens), self._graphs[shape][1]

    def shape_for(self, step: StepArrays) -> Shape | None:
        """The first graph, that is the smallest, that takes such a step, or None."""
        return next((shape for shape in self._shapes if shape.holds(step)), None)

    def warm_up(self) -> None:
        """Each shape once without a graph: compiles kernels, lets libraries choose theirs."""
        for shape in reversed(self._shapes):
            self._forward(self._batch(shape, shape.num_logits))

    def keep_launch_bound(self) -> None:
        """Warm up; drop the shapes of so many tokens that their kernels take longer than it takes to launch them."""
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
            if time.perf_counter() - start > LAUNCH_BOUND * (launched - start):
                break
            kept += shapes
        self._shapes = kept

    def capture(self, beside: StepGraphs[Any] | None = None) -> None:
        """Record all graphs, the largest first, in one memory pool. The caller holds inference_mode.

        beside: other graphs, in whose pool these have room as well, because no two run at once.
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
                    hidden = self._forward(self._batch(shape, shape.num_logits))
                self._graphs[shape] = (graph, hidden)
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
        """Seconds of steps by shape, each request with TIMED_CONTEXT tokens in the cache, if there may be so many.

        after: what is done with the output of every step. No block may hold anything yet."""
        seconds = {}
        for shape in shapes:
            self._static.pretend(shape, TIMED_CONTEXT, plan)
            seconds[shape] = seconds_of(partial(self._replay_and, shape, after))
        self._static.clear()
        return seconds

    def _replay_and(self, shape: Shape, after: Callable[[torch.Tensor], object]) -> None:
        after(self.replay(shape))

    def drop(self, shapes: Collection[Shape]) -> None:
        self._shapes = [shape for shape in self._shapes if shape not in shapes]
        for shape in shapes:
            del self._graphs[shape]

    def load(self, shape: Shape, step: StepArrays) -> ForwardBatch:
        """Copy a step into the static tensors. The batch is of the shape, but for its logits_indices, which are the
        step's; it is good until the next `load`."""
        self._static.load(shape, shape.spread(step))
        return self._batch(shape, len(step.logits_indices))

    def replay(self, shape: Shape) -> torch.Tensor:
        """What `forward` returned in the capture: good until the next replay of any shape."""
        graph, hidden = self._graphs[shape]
        graph.replay()
        return hidden

    def _batch(self, shape: Shape, num_logits: int) -> ForwardBatch:
        static, num_tokens, num_requests = self._static, shape.num_tokens, shape.num_requests
        return ForwardBatch(
            token_ids=static.token_ids[:num_tokens],
            positions=static.positions[:num_tokens],
            query_start_loc=static.query_start_loc[: num_requests + 1],
            seq_lens=static.seq_lens[:num_requests],
            block_tables=static.block_tables[:num_requests],
            slot_mapping=static.slot_mapping[:num_tokens],
            logits_indices=static.logits_indices[:num_logits],
            max_query_len=shape.max_query_len,
            max_seq_len=self._max_seq_len,
            num_decode_requests=shape.num_decodes,
            num_decode_tokens=shape.num_decode_tokens,
            max_decode_query_len=shape.max_decode_query_len,
            tree_mask=static.tree_mask[:num_tokens] if shape.is_tree else None,
        )


def seconds_of(run: Callable[[], object]) -> float:
    """What running something once more takes on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: destroying an engine's graphs and pinned memory ends a capture with an error."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
