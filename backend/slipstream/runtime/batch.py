"""A scheduled step -> the tensors of one forward pass. Engine thread.

Assembled in numpy, one torch tensor per field; on CUDA through pinned memory without a device sync. Knows nothing of
models or sampling: which rows are sampled comes with the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.nn.batch import ForwardBatch


@dataclass(slots=True)
class _TableRow:
    """What one row of the persistent block table holds: the first `num_blocks` blocks of a request's current life."""

    index: int
    num_preemptions: int = -1
    num_blocks: int = 0


class BlockTables:
    """Block tables kept between steps: a request's row grows by its new blocks instead of being rebuilt.

    Relies on Request.block_ids being append-only between two preemptions. Rows of requests that left are reclaimed when
    rows run out, so nobody has to tell this class about finished requests.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self._table = np.full((num_rows, max_blocks), -1, dtype=np.int32)
        self._rows: dict[int, _TableRow] = {}
        self._free = list(range(num_rows))

    def gather(self, requests: list[Request]) -> np.ndarray:
        """[num_requests, longest] int32, -1 pads: a copy that the caller may keep."""
        rows = self._rows
        indices, longest = [], 1
        for request in requests:
            row = rows.get(request.request_id)
            if row is None:
                row = self._new_row(request, requests)
            num_blocks = len(request.block_ids)
            if row.num_blocks != num_blocks or row.num_preemptions != request.num_preemptions:
                self._update(row, request)
            indices.append(row.index)
            if num_blocks > longest:
                longest = num_blocks
        return self._table[indices, :longest]

    def _new_row(self, request: Request, keep: list[Request]) -> _TableRow:
        if not self._free:
            live = {other.request_id for other in keep}
            for request_id in [key for key in self._rows if key not in live]:
                self._free.append(self._rows.pop(request_id).index)
        row = self._rows[request.request_id] = _TableRow(self._free.pop())
        return row

    def _update(self, row: _TableRow, request: Request) -> None:
        num_blocks = len(request.block_ids)
        start = row.num_blocks
        if row.num_preemptions != request.num_preemptions or start > num_blocks:
            start = 0
            self._table[row.index] = -1
        self._table[row.index, start:num_blocks] = request.block_ids[start:]
        row.num_blocks, row.num_preemptions = num_blocks, request.num_preemptions


class BatchBuilder:
    """Builds the ForwardBatch of each step for one device and one block size."""

    def __init__(self, block_size: int, max_model_len: int, max_num_seqs: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = BlockTables(2 * max_num_seqs, -(-max_model_len // block_size) + 1)

    def build(self, step: ScheduledStep) -> ForwardBatch:
        """Tokens in request order; logits_indices: the last row of every request that samples, in request order."""
        scheduled = step.requests
        computed = np.array([row.num_computed_tokens for row in scheduled], dtype=np.int64)
        lengths = np.array([row.num_scheduled_tokens for row in scheduled], dtype=np.int64)
        tables = self._tables.gather([row.request for row in scheduled])
        query_start_loc = np.zeros(len(scheduled) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start_loc[1:])
        seq_lens = computed + lengths
        if len(scheduled) == int(query_start_loc[-1]):  # decode only: one token per request
            request_of_token, positions = np.arange(len(scheduled)), computed
        else:
            request_of_token = np.repeat(np.arange(len(scheduled)), lengths)
            positions = np.arange(query_start_loc[-1]) + (computed - query_start_loc[:-1])[request_of_token]
        blocks = tables[request_of_token, positions // self._block_size].astype(np.int64)
        samples = np.array([row.samples for row in scheduled], dtype=bool)
        return ForwardBatch(
            token_ids=self._tensor(np.array(_token_ids(step), dtype=np.int64)),
            positions=self._tensor(positions),
            query_start_loc=self._tensor(query_start_loc.astype(np.int32)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_tables=self._tensor(tables),
            slot_mapping=self._tensor(blocks * self._block_size + positions % self._block_size),
            logits_indices=self._tensor(query_start_loc[1:][samples] - 1),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _token_ids(step: ScheduledStep) -> list[int]:
    token_ids: list[int] = []
    for row in step.requests:
        request, start = row.request, row.num_computed_tokens
        if row.num_scheduled_tokens == 1 and start < len(request.token_ids):
            token_ids.append(request.token_ids[start])
        else:
            end = start + row.num_scheduled_tokens
            token_ids += request.token_ids[start:end]
            if end > len(request.token_ids):
                token_ids += request.draft_token_ids[: end - len(request.token_ids)]
    return token_ids
