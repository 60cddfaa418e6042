"""Batches for a drafting model or head, over the block tables of the requests it drafts for. Engine thread.

A drafter's cache has as many blocks as the model's, addressed by the same tables, so that growing, sharing and freeing
blocks is decided once, by core/kv_cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.core.request import Request
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch
from slipstream.runtime.batch import TABLE_STEP, BlockTables, num_short_queries
from slipstream.runtime.host_copy import pack


@dataclass(frozen=True)
class Span:
    """`count` tokens of a request from slot `start` on."""

    request: Request
    start: int
    count: int


class DraftBatches:
    """One per drafter. num_positions: the longest sequence; a token past the blocks of its request writes nothing."""

    def __init__(self, block_size: int, num_positions: int, max_num_seqs: int, device: torch.device) -> None:
        self._block_size = block_size
        self._num_positions = num_positions
        self._device = device
        max_blocks = -(-(num_positions // block_size + 1) // TABLE_STEP) * TABLE_STEP
        self._tables = BlockTables(2 * max_num_seqs, max_blocks)
        self._table_step = 1 if device.type == "cpu" else TABLE_STEP

    def build(
        self,
        spans: Sequence[Span],
        token_ids: torch.Tensor,
        depths: Sequence[int] | None = None,
        tree_mask: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """token_ids: [sum of counts] int64 on the device, span by span; logits_indices are the last rows of the spans.

        depths, tree_mask: of each row, of spans that are trees below their first slot: its position is start + depth.
        """
        starts = np.array([span.start for span in spans], dtype=np.int64)
        counts = np.array([span.count for span in spans], dtype=np.int64)
        tables = self._tables.gather([span.request for span in spans], self._table_step)
        ends = np.cumsum(counts)
        of_row = np.repeat(np.arange(len(spans)), counts)
        places = np.arange(ends[-1]) - (ends - counts)[of_row] + starts[of_row]
        num_slots = np.array([len(span.request.block_ids) * self._block_size for span in spans], dtype=np.int64)
        inside = places < num_slots[of_row]
        columns = np.where(inside, places // self._block_size, 0)
        slots = np.where(inside, tables[of_row, columns].astype(np.int64) * self._block_size, -1)
        slots = np.where(inside, slots + places % self._block_size, -1)
        positions = places if depths is None else starts[of_row] + np.array(depths, dtype=np.int64)
        seq_lens = np.minimum(starts + counts, num_slots)  # what is past the blocks is a lone row that nobody reads
        arrays = [
            np.minimum(positions, self._num_positions - 1),
            np.concatenate([[0], ends]).astype(np.int32),
            seq_lens.astype(np.int32),
            tables,
            slots,
            ends - 1,
        ]
        positions_of, starts_of, lens_of, tables_of, slots_of, last_rows = pack(arrays, self._device)
        num_decodes = num_short_queries(counts)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions_of,
            query_start_loc=starts_of,
            seq_lens=lens_of,
            block_tables=tables_of,
            slot_mapping=slots_of,
            logits_indices=last_rows,
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            num_decode_requests=num_decodes,
            num_decode_tokens=int(ends[num_decodes - 1]) if num_decodes else 0,
            max_decode_query_len=min(int(counts[:num_decodes].max(initial=0)), MAX_DECODE_QUERY_LEN),
            tree_mask=tree_mask,
        )
