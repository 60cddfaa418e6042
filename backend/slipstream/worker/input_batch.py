"""A step's lists -> the tensors of one forward pass. Engine thread.

Assembled in numpy; on CUDA one copy from pinned memory and no device sync. A token that the step before has sampled and
that the host does not know yet is copied on the device. Knows nothing of models or of how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.core.drafts import row_depths, row_masks
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch, GroupTensors
from slipstream.worker.block_tables import TABLE_STEP, BlockTables
from slipstream.worker.host_copy import pack
from slipstream.worker.interface import StepInput


@dataclass
class SampledTokens:
    """What a step has drawn, on the device. sequence_ids: of token_ids [S] int64. table_rows: [S] int64, the rows of
    these requests in the block tables; none in a model of several stages, whose steps have no pending tokens."""

    sequence_ids: Sequence[int]
    token_ids: torch.Tensor
    table_rows: np.ndarray

    @cached_property
    def rows(self) -> dict[int, int]:
        """sequence_id -> its place in token_ids."""
        return {sequence_id: row for row, sequence_id in enumerate(self.sequence_ids)}


class PendingRows(NamedTuple):
    """Tokens that only the device has. places: of them in a step's token_ids, ascending. sources: in SampledTokens.

    are_first: the places are 0, 1, 2, …. in_order: the sources are, too, because the same requests decode on.
    """

    places: np.ndarray
    sources: np.ndarray
    are_first: bool
    in_order: bool


NO_ROWS = np.zeros(0, dtype=np.int64)
NONE_PENDING = PendingRows(NO_ROWS, NO_ROWS, True, True)


@dataclass(slots=True)
class StepArrays:
    """ForwardBatch's fields on the host; those that no graph reads are found when they are asked for.

    other_tables, other_slots: of further KV groups, [num_groups - 1, R, max_blocks] and [num_groups - 1, T].
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    logits_indices: np.ndarray
    max_query_len: int
    num_decode_requests: int
    pending: PendingRows = NONE_PENDING
    tree_mask: np.ndarray | None = None
    other_tables: np.ndarray | None = None
    other_slots: np.ndarray | None = None
    prompt_prefixes: tuple[int, ...] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every request has one token, for which it samples: starts and logits_indices are then 0, 1, 2, …"""
        return len(self.token_ids) == len(self.seq_lens) == len(self.logits_indices) and self.tree_mask is None

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())

    @property
    def num_decode_tokens(self) -> int:
        return int(self.query_start_loc[self.num_decode_requests])

    @property
    def max_decode_query_len(self) -> int:
        return int(np.diff(self.query_start_loc[: self.num_decode_requests + 1]).max(initial=0))


_ARRAYS = [field.name for field in fields(StepArrays) if field.type == "np.ndarray"]
_NUMBERS = "max_query_len", "max_seq_len", "num_decode_requests", "num_decode_tokens", "max_decode_query_len"


class BatchBuilder:
    """Builds the ForwardBatch of each step for one device and one block size.

    num_scratch_slots: that heads write behind a request's rows, perhaps behind its last block. A step's tables show
    that no block is there: those of CUDA graphs are wider, and keep blocks of earlier steps.
    """

    def __init__(self, block_size: int, tables: BlockTables, device: torch.device, num_scratch_slots: int = 0) -> None:
        self._block_size = block_size
        self._device = device
        self.tables = tables
        self.max_blocks = tables.max_blocks
        self._table_width = 1 if device.type == "cpu" else TABLE_STEP, -(-num_scratch_slots // block_size)
        self._indices = NO_ROWS  # by row of the tables, in the last step that sampled for it
        self._order = NO_ROWS  # 0, 1, 2, …, which nobody changes

    def build(self, step: StepInput, sampled: SampledTokens | None = None) -> ForwardBatch:
        """Tokens in request order; logits_indices: of every request that samples, its last token's row and its drafts'.

        sampled: of the step before, if that is not committed yet.
        """
        arrays = self.arrays(step, sampled)
        batch = self.tensors(arrays)
        fill_pending(batch.token_ids, arrays.pending, sampled)
        return batch

    def tensors(self, arrays: StepArrays) -> ForwardBatch:
        """The same on the device, without the tokens that are pending."""
        return batch_tensors(arrays, self._device)

    def sampled(self, step: StepInput, token_ids: torch.Tensor, has_stages: bool = False) -> SampledTokens:
        """token_ids: one of each request of the step that samples; has_stages: some may have been forgotten."""
        ids = step.sequence_ids
        table_rows = NO_ROWS if has_stages else self.tables.rows(ids)
        if all(step.samples):
            return SampledTokens(ids, token_ids, table_rows)
        return SampledTokens(
            list(compress(ids, step.samples)), token_ids, table_rows if has_stages else table_rows[step.samples]
        )

    def arrays(self, step: StepInput, sampled: SampledTokens | None = None) -> StepArrays:
        num_requests, num_tokens = len(step.sequence_ids), len(step.token_ids)
        all_sample, num_drafts = all(step.samples), step.total_num_drafts
        if num_tokens == num_requests and all_sample and not num_drafts:
            return self._decode_arrays(step, sampled)
        computed, lengths = _int64(step.num_computed_tokens), _int64(step.num_scheduled_tokens)
        tables = self.tables.gather(step.sequence_ids, *self._table_width)
        query_start_loc = np.zeros(num_requests + 1, dtype=np.int64)
        starts, ends = query_start_loc[:-1], np.add.accumulate(lengths, out=query_start_loc[1:])
        request_of_token = self._first(num_requests).repeat(lengths)
        positions = self._first(num_tokens) + (computed - starts).repeat(lengths)
        other_tables = self.tables.gather_others(step.sequence_ids, *self._table_width)
        slots, other_slots = self._slots(tables, other_tables, request_of_token, positions)
        longest = max(step.num_scheduled_tokens)
        num_decodes = num_requests if longest <= MAX_DECODE_QUERY_LEN else num_short_queries(lengths)
        if all_sample and num_tokens == num_requests + num_drafts:  # a verification: all rows
            logits_indices = self._first(num_tokens)
        else:
            logits_indices = ends - 1 if all_sample and not num_drafts else _last_rows(ends, _num_logits(step))
        tree_mask = None
        if step.draft_parents:
            positions, tree_mask = _tree_rows(step, num_decodes, positions.copy())
        return StepArrays(
            token_ids=_int64(step.token_ids),
            positions=positions,
            query_start_loc=query_start_loc.astype(np.int32),
            seq_lens=(computed + lengths).astype(np.int32),
            block_tables=tables,
            slot_mapping=slots,
            logits_indices=logits_indices,
            max_query_len=longest,
            num_decode_requests=num_decodes,
            pending=self._pending_tokens(step, starts, sampled),
            tree_mask=tree_mask,
            other_tables=other_tables,
            other_slots=other_slots,
            prompt_prefixes=tuple(step.num_computed_tokens[num_decodes:]),
        )

    def _decode_arrays(self, step: StepInput, sampled: SampledTokens | None) -> StepArrays:
        """`arrays` of a step in which every request has one token and samples, in a third of the operations."""
        count = len(step.token_ids)
        order, positions = self._first(count), _int64(step.num_computed_tokens)
        tables = self.tables.gather(step.sequence_ids, *self._table_width)
        other_tables = self.tables.gather_others(step.sequence_ids, *self._table_width)
        slots, other_slots = self._slots(tables, other_tables, order, positions)
        return StepArrays(
            token_ids=_decode_tokens(step),
            positions=positions,
            query_start_loc=self._first(count + 1).astype(np.int32),
            seq_lens=(positions + 1).astype(np.int32),
            block_tables=tables,
            slot_mapping=slots,
            logits_indices=order,
            max_query_len=1,
            num_decode_requests=count,
            pending=self._pending_tokens(step, order, sampled),
            other_tables=other_tables,
            other_slots=other_slots,
        )

    def _slots(
        self, tables: np.ndarray, others: np.ndarray | None, request_of_token: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The slot of each token in the first group, and in the other groups if there are any: its position, moved as
        far as its block."""
        columns = positions // self._block_size
        slots = positions + (tables[request_of_token, columns] - columns) * self._block_size
        if others is None:
            return slots, None
        blocks = np.stack([table[request_of_token, columns] for table in others])
        return slots, positions + (blocks - columns) * self._block_size

    def _pending_tokens(self, step: StepInput, starts: np.ndarray, sampled: SampledTokens | None) -> PendingRows:
        """Where tokens go that were sampled by the step before, and where they lie there. starts: of the requests."""
        count = len(step.pending)
        if not count:
            return NONE_PENDING
        assert sampled is not None, "a token that is not known, and no step that samples it"
        order = self._first(count)
        if count == len(step.token_ids) and step.sequence_ids == sampled.sequence_ids:
            return PendingRows(order, order, True, True)
        rows, begins_with_them = self.tables.rows(step.sequence_ids), step.pending[-1] == count - 1
        rows = rows[:count] if begins_with_them else rows[step.pending]
        num_sampled = len(sampled.table_rows)
        if len(self._indices) < self.tables.num_rows:
            self._indices = np.zeros(self.tables.num_rows, dtype=np.int64)
        self._indices[sampled.table_rows] = self._first(num_sampled)  # what other rows have is of earlier steps
        sources = self._indices[rows]
        # as bytes: a comparison of NumPy's and its sum take 5 us of a step
        is_found = num_sampled and sampled.table_rows.take(sources, mode="clip").tobytes() == rows.tobytes()
        assert is_found, "a token that is not known, and another step that samples it"
        if begins_with_them:
            return PendingRows(order, sources, True, bool(sources[-1] == count - 1 and (sources == order).all()))
        return PendingRows(starts[step.pending], sources, False, False)

    def _first(self, count: int) -> np.ndarray:
        """0, 1, 2, …, [count] int64: a view."""
        if count > len(self._order):
            self._order = np.arange(2 * count)
        return self._order[:count]


def _int64(values: Sequence[int]) -> np.ndarray:
    """[N] int64, without a look at each value's type first."""
    return np.fromiter(values, np.int64, len(values))


def _decode_tokens(step: StepInput) -> np.ndarray:
    """[T] int64: tokens that are pending are 0."""
    count = len(step.token_ids)
    if len(step.pending) == count:
        return np.zeros(count, dtype=np.int64)
    return _int64(step.token_ids)


def batch_tensors(arrays: StepArrays, device: torch.device) -> ForwardBatch:
    """On the device, without the tokens that are pending."""
    tensors: dict[str, Any] = dict(zip(_ARRAYS, pack([getattr(arrays, name) for name in _ARRAYS], device)))
    numbers: dict[str, Any] = {name: getattr(arrays, name) for name in _NUMBERS}
    tree_mask = None if arrays.tree_mask is None else pack([arrays.tree_mask], device)[0]
    groups: tuple[GroupTensors, ...] = ()
    if arrays.other_tables is not None and arrays.other_slots is not None:
        packed, count = pack([*arrays.other_tables, *arrays.other_slots], device), len(arrays.other_tables)
        groups = tuple(map(GroupTensors, packed[:count], packed[count:]))
    prefixes = arrays.prompt_prefixes
    return ForwardBatch(**tensors, **numbers, tree_mask=tree_mask, other_groups=groups, prompt_prefixes=prefixes)


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
        prompt_prefixes=() if is_decode else (0,),
    )


def _num_logits(step: StepInput) -> np.ndarray:
    """How many rows of each request sample: its last token's and its drafts'; 0 if it does not sample."""
    counts = np.array(step.samples, dtype=np.int64)
    return counts * (1 + np.array(step.num_drafts, dtype=np.int64)) if step.total_num_drafts else counts


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last counts[r] rows of each request, whose rows end before ends[r]; [sum of counts] int64."""
    if counts.max(initial=0) <= 1:
        return ends[counts > 0] - 1
    firsts = np.repeat(ends - counts, counts)
    return firsts + np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)


def _tree_rows(step: StepInput, num_decodes: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions by depth, and the mask word of each decode row; chains and single tokens see what is before them.

    positions: [T], those of the slots; changed in place and returned.
    """
    masks: list[int] = []
    for place in range(num_decodes):
        num_drafts = step.num_drafts[place]
        parents = step.draft_parents.get(step.sequence_ids[place], ())
        if parents:
            start = len(masks)
            depths = np.array(row_depths(parents, num_drafts))
            positions[start : start + 1 + num_drafts] = step.num_computed_tokens[place] + depths
        masks += row_masks(parents, step.num_scheduled_tokens[place] - 1)
    return positions, np.array(masks, dtype=np.int64)


def num_short_queries(lengths: np.ndarray) -> int:
    """How many requests at the head of a step are decodes: their queries are as short as a verify step's.

    The first prompt of a step ends them, so the short ones that follow a long one are not among them.
    """
    is_long = lengths > MAX_DECODE_QUERY_LEN
    return int(is_long.argmax()) if is_long.any() else len(lengths)


def fill_pending(token_ids: torch.Tensor, pending: PendingRows, sampled: SampledTokens | None) -> None:
    """Put tokens that were never on the host into their places of token_ids [T]."""
    count = len(pending.places)
    if not count:
        return
    assert sampled is not None
    if pending.in_order:
        sources = sampled.token_ids
        token_ids[:count].copy_(sources if sources.shape[0] == count else sources[:count])
        return
    places, sources = pack([pending.places, pending.sources], token_ids.device)
    token_ids.index_copy_(0, places, sampled.token_ids.index_select(0, sources))
