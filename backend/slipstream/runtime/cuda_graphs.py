"""Decode steps captured as CUDA graphs at start: one launch in place of some hundred. Engine thread.

One graph per number of requests; a step of fewer is padded with requests of no tokens (seq_len 0, slot -1), which write
nothing and attend to nothing. All graphs read the same static tensors. Knows tensors only: no requests, no model.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from slipstream.core.errors import ConfigError
from slipstream.nn.batch import ForwardBatch
from slipstream.runtime.batch import StepArrays

logger = logging.getLogger(__name__)

# Numbers of requests to capture for. Up to 64 a row costs little beside the weights; above, steps of 32 at most.
DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def graph_sizes(wanted: str, max_num_seqs: int, device: torch.device, refusal: str | None = None) -> tuple[int, ...]:
    """Sizes to capture, ascending. wanted: "auto", "off" or a list like "1,2,4"; a CPU has none.

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


class DecodeGraphs:
    """forward: a batch of static tensors -> hidden states [T, H], whose kernels depend on its sizes alone."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        max_blocks: int,
        max_seq_len: int,
        forward: Callable[[ForwardBatch], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._sizes = sizes
        self._max_seq_len = max_seq_len
        self._forward = forward
        largest = max(sizes, default=0)
        # token_ids, positions, slot_mapping: int64, then seq_lens: int32, then this step's block tables as they come
        self._num_fixed_bytes = largest * (3 * 8 + 4)
        self._static = torch.zeros(self._num_fixed_bytes + largest * max_blocks * 4, dtype=torch.uint8, device=device)
        long = self._static[: largest * 24].view(torch.int64).view(3, largest)
        self._token_ids, self._positions, self._slot_mapping = long
        self._seq_lens = self._static[largest * 24 : self._num_fixed_bytes].view(torch.int32)
        self._arriving_tables = self._static[self._num_fixed_bytes :].view(torch.int32)
        self._block_tables = torch.zeros(largest, max_blocks, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._slot_mapping.fill_(-1)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def size_for(self, num_requests: int, num_tokens: int) -> int | None:
        """The graph that takes such a step, or None: it is no pure decode, or larger than all graphs."""
        if num_requests != num_tokens or not self._sizes or num_requests > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, num_requests)]

    def warm_up(self) -> None:
        """Each size once without a graph: compiles kernels, lets libraries choose theirs."""
        for size in reversed(self._sizes):
            self._forward(self._batch(size))

    def capture(self) -> None:
        """Record all graphs, the largest first, in one memory pool. The caller holds inference_mode."""
        if not self._sizes:
            return
        start = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                hidden = self._forward(self._batch(size))
            self._graphs[size] = (graph, hidden)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        logger.info("captured decode graphs for %s requests in %.2f s", ", ".join(map(str, self._sizes)), seconds)

    def load(self, size: int, arrays: StepArrays) -> ForwardBatch:
        """Copy a step into the static tensors, padded to `size`; one copy from the host and one on the device.

        The returned batch's tensors are of `size` requests, and good until the next `load`. Its logits_indices are all
        rows: a step in which some do not sample selects them itself.
        """
        count = len(arrays.token_ids)
        largest, (_, width) = self._sizes[-1], arrays.block_tables.shape
        num_bytes = self._num_fixed_bytes + count * width * 4
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        view = staging.numpy()
        long = view[: largest * 24].view(np.int64).reshape(3, largest)
        for row, (values, padding) in enumerate(
            ((arrays.token_ids, 0), (arrays.positions, 0), (arrays.slot_mapping, -1))
        ):
            long[row, :count] = values
            long[row, count:] = padding
        seq_lens = view[largest * 24 : self._num_fixed_bytes].view(np.int32)
        seq_lens[:count] = arrays.seq_lens
        seq_lens[count:] = 0
        view[self._num_fixed_bytes :].view(np.int32).reshape(count, width)[:] = arrays.block_tables
        self._static[:num_bytes].copy_(staging, non_blocking=True)
        self._block_tables[:count, :width].copy_(self._arriving_tables[: count * width].view(count, width))
        return self._batch(size)

    def replay(self, size: int) -> torch.Tensor:
        """[size, H]: good until the next replay of any size."""
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden

    def _batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self._slot_mapping[:size],
            logits_indices=self._query_start_loc[:size],
            max_query_len=1,
            max_seq_len=self._max_seq_len,
            num_decode_requests=size,
            num_decode_tokens=size,
            max_decode_query_len=1,
        )
