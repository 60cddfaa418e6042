"""A scheduled step -> the tensors of one forward pass. Engine thread.

Assembled in numpy; on CUDA one copy from pinned memory and no device sync. A token that the step before has sampled and
that the host does not know yet is copied on the device. Knows nothing of models or of how tokens are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from slipstream.core.drafts import row_depths, row_masks
from slipstream.core.request import Request
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch
from slipstream.worker.host_copy import pack, to_device

# On CUDA block tables are multiples of this wide: kernels are compiled once, for strides that 16 divides.
TABLE_STEP = 16


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

    def gather(self, requests: list[Request], width_step: int = 1) -> np.ndarray:
        """[num_requests, longest up to a multiple of width_step] int32, -1 pads: a copy that the caller may keep."""
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
        return self._table[indices, : -(-longest // width_step) * width_step]

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


@dataclass(frozen=True)
class SampledTokens:
    """What a step has drawn, on the device. rows: request_id -> its place in token_ids [S] int64."""

    rows: dict[int, int]
    token_ids: torch.Tensor


@dataclass(frozen=True)
class StepArrays:
    """ForwardBatch's fields on the host. pending: (token, place in SampledTokens) of those that only the device has."""

    token_ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    logits_indices: np.ndarray
    max_query_len: int
    max_seq_len: int
    num_decode_requests: int
    num_decode_tokens: int
    max_decode_query_len: int
    pending: list[tuple[int, int]]
    tree_mask: np.ndarray | None = None


class BatchBuilder:
    """Builds the ForwardBatch of each step for one device and one block size."""

    def __init__(self, block_size: int, max_model_len: int, max_num_seqs: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self.max_blocks = -(-(max_model_len // block_size + 1) // TABLE_STEP) * TABLE_STEP
        self._tables = BlockTables(2 * max_num_seqs, self.max_blocks)
        self._table_step = 1 if device.type == "cpu" else TABLE_STEP

    def build(self, step: ScheduledStep, sampled: SampledTokens | None = None) -> ForwardBatch:
        """Tokens in request order; logits_indices: of every request that samples, its last token's row and its drafts'.

        sampled: of the step before, if that is not committed yet.
        """
        arrays = self.arrays(step, sampled)
        batch = self.tensors(arrays)
        fill_pending(batch.token_ids, arrays.pending, sampled)
        return batch

    def tensors(self, arrays: StepArrays) -> ForwardBatch:
        """The same on the device, without the tokens that are pending."""
        names = [field.name for field in fields(StepArrays) if field.type == "np.ndarray"]
        tensors: dict[str, Any] = dict(zip(names, pack([getattr(arrays, name) for name in names], self._device)))
        numbers: dict[str, Any] = {
            field.name: getattr(arrays, field.name) for field in fields(StepArrays) if field.type == "int"
        }
        tree_mask = None if arrays.tree_mask is None else pack([arrays.tree_mask], self._device)[0]
        return ForwardBatch(**tensors, **numbers, tree_mask=tree_mask)

    def arrays(self, step: ScheduledStep, sampled: SampledTokens | None = None) -> StepArrays:
        scheduled = step.requests
        computed = np.array([row.num_computed_tokens for row in scheduled], dtype=np.int64)
        lengths = np.array([row.num_scheduled_tokens for row in scheduled], dtype=np.int64)
        tables = self._tables.gather([row.request for row in scheduled], self._table_step)
        query_start_loc = np.zeros(len(scheduled) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start_loc[1:])
        seq_lens = computed + lengths
        if len(scheduled) == int(query_start_loc[-1]):  # decode only: one token per request
            request_of_token, positions = np.arange(len(scheduled)), computed
        else:
            request_of_token = np.repeat(np.arange(len(scheduled)), lengths)
            positions = np.arange(query_start_loc[-1]) + (computed - query_start_loc[:-1])[request_of_token]
        blocks = tables[request_of_token, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        num_logits = np.array([row.samples * (1 + row.num_drafts) for row in scheduled], dtype=np.int64)
        token_ids, pending = _token_ids(step, sampled)
        num_decodes = num_short_queries(lengths)
        tree_mask = None
        if any(row.request.draft_parents for row in scheduled if row.num_drafts):
            positions, tree_mask = _tree_rows(scheduled[:num_decodes], positions.copy())
        return StepArrays(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            query_start_loc=query_start_loc.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=tables,
            slot_mapping=slots,
            logits_indices=_last_rows(query_start_loc[1:], num_logits),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            num_decode_requests=num_decodes,
            num_decode_tokens=int(query_start_loc[num_decodes]),
            max_decode_query_len=int(lengths[:num_decodes].max(initial=0)),
            pending=pending,
            tree_mask=tree_mask,
        )


def padding_batch(num_tokens: int, max_blocks: int, device: torch.device) -> ForwardBatch:
    """One request whose tokens write nothing (slot -1) and attend to whatever the first block holds."""
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    is_decode = num_tokens <= MAX_DECODE_QUERY_LEN
    return ForwardBatch(
        token_ids=token_ids,
        positions=token_ids,
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.zeros(1, max_blocks, dtype=torch.int32, device=device),
        slot_mapping=token_ids - 1,
        logits_indices=token_ids[:1],
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        num_decode_requests=int(is_decode),
        num_decode_tokens=num_tokens if is_decode else 0,
        max_decode_query_len=num_tokens if is_decode else 0,
    )


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last counts[r] rows of each request, whose rows end before ends[r]; [sum of counts] int64."""
    if counts.max(initial=0) <= 1:
        return ends[counts > 0] - 1
    firsts = np.repeat(ends - counts, counts)
    return firsts + np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)


def _tree_rows(decodes: list[ScheduledRequest], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions by depth, and the mask word of each decode row; chains and single tokens see what is before them.

    positions: [T], those of the slots; changed in place and returned.
    """
    masks: list[int] = []
    for row in decodes:
        parents, num_drafts = row.request.draft_parents[: row.num_drafts], row.num_drafts
        if parents:
            start = len(masks)
            positions[start : start + 1 + num_drafts] = row.num_computed_tokens + np.array(
                row_depths(parents, num_drafts)
            )
        masks += row_masks(parents, row.num_scheduled_tokens - 1)
    return positions, np.array(masks, dtype=np.int64)


def num_short_queries(lengths: np.ndarray) -> int:
    """How many requests at the head of a step are decodes: their queries are as short as a verify step's.

    The first prompt of a step ends them, so the short ones that follow a long one are not among them.
    """
    is_long = lengths > MAX_DECODE_QUERY_LEN
    return int(is_long.argmax()) if is_long.any() else len(lengths)


def fill_pending(token_ids: torch.Tensor, pending: list[tuple[int, int]], sampled: SampledTokens | None) -> None:
    """Put tokens that were never on the host into their places of token_ids [T]."""
    if not pending:
        return
    assert sampled is not None
    count = len(pending)
    if all(pair == (index, index) for index, pair in enumerate(pending)):  # the same requests decode on: one copy
        token_ids[:count].copy_(sampled.token_ids[:count])
        return
    flat = [number for column in zip(*pending) for number in column]
    places, sources = to_device(flat, torch.int64, token_ids.device).view(2, count)
    token_ids.index_copy_(0, places, sampled.token_ids.index_select(0, sources))


def _token_ids(step: ScheduledStep, sampled: SampledTokens | None) -> tuple[list[int], list[tuple[int, int]]]:
    token_ids: list[int] = []
    pending: list[tuple[int, int]] = []
    for row in step.requests:
        request, start = row.request, row.num_computed_tokens
        if start >= len(request.token_ids):
            assert sampled is not None, "a token that is not known, and no step that samples it"
            pending.append((len(token_ids), sampled.rows[request.request_id]))
            token_ids.append(0)
        elif row.num_scheduled_tokens == 1:
            token_ids.append(request.token_ids[start])
        else:
            end = start + row.num_scheduled_tokens
            token_ids += request.token_ids[start:end]
            if end > len(request.token_ids):
                token_ids += request.draft_token_ids[: end - len(request.token_ids)]
    return token_ids, pending
