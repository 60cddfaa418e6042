"""Batches for a draft model or head, over the block tables of the requests it drafts for. Engine thread.

A drafter's cache has as many blocks as the model's and uses the same block tables, so core/kv_cache.py alone decides
about blocks. The first batch of a draft is built on the host, the rows of further levels on the device, so that a
whole draft can be one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slipstream_kernels import ops

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.block_tables import TABLE_STEP, BlockTables
from slipstream.worker.input_batch import StepArrays, num_short_queries
from slipstream.worker.request_state import RequestState


@dataclass(frozen=True)
class Span:
    """`count` tokens of a request from slot `start` on, all of them in blocks of the request."""

    request: RequestState
    start: int
    count: int


class DraftBatches:
    """One per drafter. tables: the model's. num_positions: the longest sequence. num_more: slots after a span that
    further levels write."""

    def __init__(
        self, tables: BlockTables, block_size: int, num_positions: int, device: torch.device, num_more: int
    ) -> None:
        self.block_size = block_size
        self.num_positions = num_positions
        self.rows_after = RowsAfter(block_size, num_positions)
        self.max_blocks = tables.max_blocks
        self._tables = tables
        self._table_width = 1 if device.type == "cpu" else TABLE_STEP, -(-num_more // block_size)

    def arrays(self, spans: Sequence[Span], token_ids: Sequence[int]) -> StepArrays:
        """token_ids: span by span."""
        starts = np.array([span.start for span in spans], dtype=np.int64)
        counts = np.array([span.count for span in spans], dtype=np.int64)
        sequence_ids = [span.request.sequence_id for span in spans]
        tables = self._tables.gather(sequence_ids, *self._table_width)
        ends = np.cumsum(counts)
        of_row = np.repeat(np.arange(len(spans)), counts)
        positions = np.arange(ends[-1]) - (ends - counts)[of_row] + starts[of_row]
        blocks = tables[of_row, positions // self.block_size].astype(np.int64)
        num_decodes = num_short_queries(counts)
        return StepArrays(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            query_start_loc=np.concatenate([[0], ends]).astype(np.int32),
            seq_lens=(starts + counts).astype(np.int32),
            block_tables=tables,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            logits_indices=np.empty(0, dtype=np.int64),
            max_query_len=int(counts.max()),
            num_decode_requests=num_decodes,
            prompt_prefixes=tuple(starts[num_decodes:].tolist()),
        )


class RowsAfter:
    """Builds the batches of further draft levels on the device. num_positions: the longest sequence."""

    def __init__(self, block_size: int, num_positions: int) -> None:
        self._block_size = block_size
        self._num_positions = num_positions

    def __call__(
        self,
        batch: ForwardBatch,
        last: torch.Tensor,
        token_ids: torch.Tensor,
        first: int,
        rows_per_level: int = 1,
        tree_mask: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Rows after the row `last` of each request of `batch`, in slots `first`, … after it.

        token_ids, tree_mask: [num_requests * n], n rows each, rows_per_level per level. Padding requests, and requests
        whose blocks end before the last row, write nothing; their rows are ignored.
        """
        num_requests = len(last)
        num_rows = len(token_ids) // num_requests
        rows = ops.prepare_draft_inputs(
            batch.positions,
            last,
            batch.seq_lens,
            batch.block_tables,
            ops.LevelPlaces(first, num_rows, rows_per_level),
            block_size=self._block_size,
            num_positions=self._num_positions,
        )
        return ForwardBatch(
            token_ids=token_ids,
            positions=rows.positions,
            query_start_loc=torch.arange(
                0, len(token_ids) + 1, num_rows, dtype=torch.int32, device=batch.positions.device
            ),
            seq_lens=rows.seq_lens,
            block_tables=batch.block_tables,
            slot_mapping=rows.slots,
            logits_indices=last[:0],
            max_query_len=num_rows,
            max_seq_len=min(self._num_positions, batch.max_seq_len + first + num_rows),
            num_decode_requests=num_requests,
            num_decode_tokens=num_requests * num_rows,
            max_decode_query_len=num_rows,
            tree_mask=tree_mask,
        )


def last_rows(batch: ForwardBatch) -> torch.Tensor:
    """The last row of each request, [num_requests] int64; any row for a padding request."""
    return (batch.query_start_loc[1:].long() - 1).clamp(min=0)
