"""Steps captured as CUDA graphs: one launch in place of some hundred. Engine thread.

Graphs of decodes and verifications are captured at start, those of steps with prompts afterwards. A graph has a
capacity of tokens and requests and runs every step that fits: decodes, verifications, short prompts. Lengths are data.
Steps are padded with tokens that write nothing (slot -1) and requests that attend to nothing (seq_len 0). All graphs
read the same static tensors, and begin by completing them. Knows tensors only: no requests, no model.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.graph_shapes import GraphShape, StepShape
from slipstream.worker.input_batch import StepArrays
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.static_tensors import GraphInputs, StaticTensors

logger = logging.getLogger(__name__)

# A step is captured if its kernels take at most this many times as long as their launches.
LAUNCH_BOUND = 1.3
# Batches of views that are kept, a few KB each: steps with and without prompts alternate, and one takes 30 us to make.
MOST_BATCHES = 1024
# Cached tokens per request while steps are timed.
TIMED_CONTEXT = 1024
SHORT_CONTEXT = 64  # of a second timing, which tells what cached tokens take

Shape = TypeVar("Shape", bound=StepShape)
_num_tokens: Callable[[StepShape], int] = attrgetter("num_tokens")
AnyOf = Callable[[bool], bool]  # whether any rank says so, each at the same time


class StepGraphs(Generic[Shape]):
    """forward: a batch of static tensors -> hidden states; its kernels must depend on the shape only, and the first one
    must not start early (slipstream_kernels/dependent_launch.py).

    draw: hidden states and batch of decodes -> logits [num_tokens, vocab], which may be changed; captured behind them.
    It draws tokens, too."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        inputs: GraphInputs,
        forward: Callable[[ForwardBatch], torch.Tensor],
        draw: Callable[[torch.Tensor, ForwardBatch], torch.Tensor] | None = None,
    ) -> None:
        """shapes: ascending by tokens."""
        self._shapes = list(shapes)
        self._forward, self._draw = forward, draw
        self._logits: dict[Shape, torch.Tensor] = {}  # of the graphs that draw
        self._static = StaticTensors(self._shapes, inputs)
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._any_of: AnyOf | None = None
        self._pool = torch.cuda.graph_pool_handle() if shapes and inputs.device.type == "cuda" else None
        self._batches: dict[tuple[Shape, int], ForwardBatch] = {}  # by number of logits_indices; views only
        self._last_batch: tuple[Shape | None, int, ForwardBatch | None] = None, 0, None
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
        first = bisect_left(self._shapes, len(step.token_ids), key=_num_tokens)
        return next((shape for shape in islice(self._shapes, first, None) if shape.holds(step)), None)

    def warm_up(self) -> None:
        """Run each shape once without a graph, to compile kernels and initialise libraries."""
        for shape in reversed(self._shapes):
            self._run(shape)

    def _run(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is captured."""
        self._static.unpack(shape)
        return self._compute(shape)

    def _compute(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch = self._batch(shape, shape.num_logits)
        hidden = self._forward(batch)
        return hidden, self._draw(hidden, batch) if self._draw is not None and shape.max_query_len == 1 else None

    def keep_launch_bound(
        self, any_of: AnyOf, warming: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Warm up, and drop the shapes whose kernels take longer than LAUNCH_BOUND times their launches.

        warming: within it steps are run that are not timed.

        any_of: several ranks wait for each other's sums, so only the one that launches last sees what bounds them all:
        its word keeps a shape."""
        groups = [list(group) for _, group in groupby(self._shapes, _num_tokens)]
        num_kept, end = 0, len(groups)  # of groups known to be kept, and where those begin that are known not to be
        num_warm = 0
        while num_kept < end:
            middle = (num_kept + end) // 2
            with warming():
                for shape in chain.from_iterable(groups[num_warm : middle + 1]):
                    self._forward(self._batch(shape, shape.num_logits))
            num_warm = max(num_warm, middle + 1)
            if any_of(self._is_launch_bound(groups[middle][0])):
                num_kept = middle + 1
            else:
                end = middle
        self._shapes = list(chain.from_iterable(groups[:num_kept]))
        self._decode_shapes.clear()

    def _is_launch_bound(self, shape: Shape) -> bool:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._forward(self._batch(shape, shape.num_logits))
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return time.perf_counter() - start <= LAUNCH_BOUND * (launched - start)

    def capture(self, beside: StepGraphs[Any] | None = None, when_taken: AnyOf | None = None) -> None:
        """Record graphs in one memory pool, the largest first. The caller holds inference_mode.

        beside: other graphs, whose memory pool is shared, because no two graphs run at once.

        when_taken: record now those of decodes and verifications, and the largest, in whose memory all others have
        room. Others are recorded when nothing is to be done (`capture_next`), or by the first step that takes them,
        which takes some 20 ms more than if it were launched kernel by kernel: some sixty took a third of a start. This
        tells all ranks whether one of them has no memory for a graph, which then none has."""
        if not self._shapes:
            return
        start = time.perf_counter()
        if beside is not None and beside._pool is not None:
            self._pool = beside._pool
        self._any_of, largest = when_taken, self._shapes[-1]
        for shape in reversed(self._shapes):
            if when_taken is None or shape.at_start or shape == largest:
                self._record(shape)
        decodes = [str(shape.num_requests) for shape in self._shapes if shape.max_query_len == 1]
        logger.info(
            "captured %d graphs in %.2f s%s; %d more of up to %d tokens follow",
            len(self._graphs), time.perf_counter() - start,
            f", decode steps of {', '.join(decodes)} requests" if decodes else "",
            len(self._shapes) - len(self._graphs), largest.num_tokens,
        )  # fmt: skip

    def capture_next(self) -> bool:
        """Record one graph more, the largest. Returns whether there was one."""
        shape = next((shape for shape in reversed(self._shapes) if shape not in self._graphs), None)
        return shape is not None and self._try_capture(shape)

    def captured_for(self, step: StepArrays) -> Shape | None:
        """The smallest graph that fits the step, recorded now if it has not been, or None."""
        shape = self.shape_for(step)
        while not (shape is None or shape in self._graphs or self._try_capture(shape)):
            shape = self.shape_for(step)
        return shape

    def _try_capture(self, shape: Shape) -> bool:
        """Record it. Returns False, and drops all graphs that are not recorded, if a rank has no memory for it."""
        assert self._any_of is not None, "all have been captured at start"
        failure = None
        try:
            self._record(shape)
        except torch.OutOfMemoryError as error:
            failure = str(error).splitlines()[0]
        if not self._any_of(failure is not None):
            return True
        missing = {shape, *(other for other in self._shapes if other not in self._graphs)}
        logger.warning(
            "steps like %d CUDA graphs are launched kernel by kernel: no memory to capture them (%s)",
            len(missing), failure or "on another rank",
        )  # fmt: skip
        self.drop(missing)
        return False

    def _record(self, shape: Shape) -> None:
        """All kernels of the shape have run before (`warm_up`). Runs nothing: static tensors stay as they are."""
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden, logits = self._run(shape)
        self._graphs[shape] = graph, hidden
        if logits is not None:  # not owned, for the next graph to have the memory of the logits
            self._logits[shape] = _unowned(logits)

    def time_steps(
        self,
        shapes: Sequence[Shape],
        plan: MemoryPlan,
        after: Callable[[torch.Tensor], object],
        context: int = TIMED_CONTEXT,
    ) -> dict[Shape, float]:
        """Seconds of steps by shape, with so many cached tokens per request, or as many as fit.

        after: called with the output of every step whose graph does not draw, and timed with it. The KV pool must
        still be empty."""
        seconds = {}
        for shape in shapes:
            self._static.pretend(shape, context, plan)
            seconds[shape] = seconds_of(partial(self._replay_and, shape, after))
        self._static.clear()
        return seconds

    def _replay_and(self, shape: Shape, after: Callable[[torch.Tensor], object]) -> None:
        hidden = self.replay(shape)
        if shape not in self._logits:
            after(hidden)

    def drop(self, shapes: Collection[Shape]) -> None:
        self._shapes = [shape for shape in self._shapes if shape not in shapes]
        self._decode_shapes.clear()
        for shape in shapes:
            self._graphs.pop(shape, None)
            self._logits.pop(shape, None)

    def load(self, shape: Shape, step: StepArrays) -> ForwardBatch:
        """Copy a step into the static tensors. The batch has the graph's shape, except logits_indices, which has the
        step's. Valid until the next `load`; its block tables and pending tokens from the replay on."""
        self._static.load(shape, shape.spread(step))
        num_logits, (last_shape, last_count, batch) = len(step.logits_indices), self._last_batch
        if last_shape is not shape or last_count != num_logits or batch is None:
            batch = self._kept_batch(shape, num_logits)
            self._last_batch = shape, num_logits, batch
        return batch

    def replay(self, shape: Shape) -> torch.Tensor:
        """The output of `forward`; valid until the next replay of any shape."""
        graph, hidden = self._graphs[shape]
        graph.replay()
        return hidden

    def logits(self, shape: Shape) -> torch.Tensor | None:
        """Those of the last replay, if it was of this shape and its graph draws; valid as long as its output."""
        return self._logits.get(shape)

    def _kept_batch(self, shape: Shape, num_logits: int) -> ForwardBatch:
        key = shape, num_logits
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= MOST_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = self._batch(shape, num_logits)
        return batch

    def _batch(self, shape: Shape, num_logits: int) -> ForwardBatch:
        return self._static.batch(shape, num_logits)


class _Bytes:
    """The bytes of a storage on the device, in a form that torch.as_tensor views without owning them."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        data, shape = (storage.data_ptr(), False), (storage.nbytes(),)
        self.__cuda_array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 2}


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory of a graph, which others of its pool may have, too: logits of a graph for each number of requests
    would hold a gigabyte."""
    memory = torch.as_tensor(_Bytes(tensor.untyped_storage()), device=tensor.device).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class StepTimes:
    """Seconds of graphs with `context` cached tokens of each request, and of one cached token more."""

    seconds: Mapping[GraphShape, float]
    of_cached_token: float = 0.0
    context: int = 0

    def without(self, shapes: Collection[GraphShape]) -> StepTimes:
        return replace(self, seconds={shape: took for shape, took in self.seconds.items() if shape not in shapes})


NO_TIMES = StepTimes({})


def time_decodes(
    graphs: StepGraphs[GraphShape], plan: MemoryPlan, after: Callable[[torch.Tensor], object]
) -> StepTimes:
    """Time decodes and verifications; see `StepGraphs.time_steps`. What a cached token takes is that of the largest
    decode."""
    timed = [shape for shape in graphs.shapes if shape.max_query_len == 1 or shape.is_verification]
    seconds, context = graphs.time_steps(timed, plan, after), min(TIMED_CONTEXT, plan.max_model_len - 1)
    largest = max((shape for shape in timed if shape.max_query_len == 1), default=None)
    if largest is None or context <= SHORT_CONTEXT:
        return StepTimes(seconds)
    more = seconds[largest] - graphs.time_steps([largest], plan, after, SHORT_CONTEXT)[largest]
    return StepTimes(seconds, max(0.0, more) / (largest.num_requests * (context - SHORT_CONTEXT)), context)


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
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
