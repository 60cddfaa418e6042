"""A step's lists -> the tensors of one forward pass. Engine thread.

Assembled in numpy; on CUDA one copy from pinned memory and no device sync. A token that the step before has sampled and
that the host does not know yet is copied on the device. Knows nothing of models or of how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.core.drafts import row_depths, row_masks
from slipstream.core.kv_groups import ONE_GROUP, KVGroups
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch, GroupTensors
from slipstream.worker.host_copy import pack
from slipstream.worker.interface import StepInput

# On CUDA block tables are multiples of this wide: kernels are compiled once, for strides that 16 divides.
TABLE_STEP = 16


def table_width(max_model_len: int, block_size: int) -> int:
    """Blocks of a row of the block tables: sequences of max_model_len tokens and the token after them."""
    return -(-(max_model_len // block_size + 1) // TABLE_STEP) * TABLE_STEP


class BlockTables:
    """Block tables of all KV groups, kept between steps: a request's row grows by its new blocks instead of being
    rebuilt. Windowed groups keep entries that their windows have passed: nothing reads those."""

    def __init__(self, num_rows: int, max_blocks: int, groups: KVGroups = ONE_GROUP) -> None:
        self.max_blocks = max_blocks
        self.groups = groups
        self._table = np.full((groups.num_groups, num_rows, max_blocks), -1, dtype=np.int32)
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)  # of the full groups
        self._num_window_blocks = np.zeros(num_rows, dtype=np.int64)
        self._rows: dict[int, int] = {}  # by request id
        self._free = list(range(num_rows))
        self._last_ids: Sequence[int] = ()
        self._last_rows = np.zeros(0, dtype=np.int64)

    @classmethod
    def sized(cls, num_rows: int, max_model_len: int, block_size: int, groups: KVGroups = ONE_GROUP) -> BlockTables:
        """For sequences of max_model_len tokens and the token after them."""
        return cls(num_rows, table_width(max_model_len, block_size), groups)

    def put(self, sequence_id: int, block_ids: Sequence[int], window_block_ids: Sequence[int] = ()) -> None:
        """These are all blocks of a request, whatever it had before."""
        row = self._rows.get(sequence_id)
        if row is None:
            row = self._rows[sequence_id] = self._new_row()
            self._last_ids = ()
        self._table[:, row] = -1
        self._num_blocks[row] = self._num_window_blocks[row] = 0
        self.extend(sequence_id, block_ids)
        self.extend_windows(sequence_id, window_block_ids)

    def extend(self, sequence_id: int, block_ids: Sequence[int]) -> None:
        row = self._rows.get(sequence_id)
        if row is not None:
            self._num_blocks[row] += _append(
                self._table[: self.groups.num_full, row], int(self._num_blocks[row]), block_ids
            )

    def extend_all(self, block_ids: Mapping[int, Sequence[int]]) -> None:
        """`extend` by sequence id; requests with one new block, nearly all that decode, at once."""
        rows, blocks, are_single = [], [], self.groups.num_full == 1
        for sequence_id, new_ids in block_ids.items():
            if not (are_single and len(new_ids) == 1):
                self.extend(sequence_id, new_ids)
            elif (row := self._rows.get(sequence_id)) is not None:
                rows.append(row)
                blocks.append(new_ids[0])
        if rows:
            self._table[0, rows, self._num_blocks[rows]] = blocks
            self._num_blocks[rows] += 1

    def extend_windows(self, sequence_id: int, window_block_ids: Sequence[int]) -> None:
        row = self._rows.get(sequence_id)
        if row is not None and len(window_block_ids):
            table, start = self._table[self.groups.num_full :, row], int(self._num_window_blocks[row])
            self._num_window_blocks[row] += _append(table, start, window_block_ids)

    def drop(self, sequence_ids: Iterable[int]) -> None:
        self._last_ids = ()
        self._free += [self._rows.pop(sequence_id) for sequence_id in sequence_ids if sequence_id in self._rows]

    def gather(self, sequence_ids: Sequence[int], width_step: int = 1) -> np.ndarray:
        """Of the first group: [num_requests, longest up to a multiple of width_step] int32, -1 pads: a copy that the
        caller may keep."""
        indices, width = self._rows_of(sequence_ids, width_step)
        return self._table[0][indices, :width]

    def gather_others(self, sequence_ids: Sequence[int], width_step: int = 1) -> np.ndarray | None:
        """Of the other groups, as wide: [num_groups - 1, num_requests, width]; None if there are none."""
        if self.groups.num_groups == 1:
            return None
        indices, width = self._rows_of(sequence_ids, width_step)
        return np.stack([table[indices, :width] for table in self._table[1:]])

    def _rows_of(self, sequence_ids: Sequence[int], width_step: int) -> tuple[np.ndarray, int]:
        if not self._last_ids or sequence_ids != self._last_ids:
            rows = self._rows
            self._last_rows = np.array([rows[sequence_id] for sequence_id in sequence_ids], dtype=np.int64)
            self._last_ids = sequence_ids
        indices = self._last_rows
        longest = max(1, int(self._num_blocks[indices].max()))
        return indices, -(-longest // width_step) * width_step

    def _new_row(self) -> int:
        if not self._free:  # preempted requests keep theirs until they come back
            size = self._table.shape[1]
            self._table = np.concatenate([self._table, np.full_like(self._table, -1)], axis=1)
            self._num_blocks = np.concatenate([self._num_blocks, np.zeros_like(self._num_blocks)])
            self._num_window_blocks = np.concatenate([self._num_window_blocks, np.zeros_like(self._num_window_blocks)])
            self._free = list(range(size, 2 * size))
        return self._free.pop()


def _append(table: np.ndarray, start: int, block_ids: Sequence[int]) -> int:
    """Write blocks, in which the table's groups take turns, from place `start` on. Returns how many each got."""
    num_groups = len(table)
    if num_groups == 1:
        table[0, start : start + len(block_ids)] = block_ids
        return len(block_ids)
    count = len(block_ids) // num_groups
    table[:, start : start + count] = np.array(block_ids, dtype=np.int32).reshape(count, num_groups).T
    return count


@dataclass(frozen=True)
class SampledTokens:
    """What a step has drawn, on the device. sequence_ids: of token_ids [S] int64."""

    sequence_ids: Sequence[int]
    token_ids: torch.Tensor

    @cached_property
    def rows(self) -> dict[int, int]:
        """sequence_id -> its place in token_ids."""
        return {sequence_id: row for row, sequence_id in enumerate(self.sequence_ids)}


class PendingRows(NamedTuple):
    """Tokens that only the device has. places: of them in a step's token_ids, ascending. sources: in SampledTokens.

    in_order: both are 0, 1, 2, …, because the same requests decode on.
    """

    places: np.ndarray
    sources: np.ndarray
    in_order: bool


NONE_PENDING = PendingRows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), True)


@dataclass(frozen=True)
class StepArrays:
    """ForwardBatch's fields on the host.

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
    max_seq_len: int
    num_decode_requests: int
    num_decode_tokens: int
    max_decode_query_len: int
    pending: PendingRows = NONE_PENDING
    tree_mask: np.ndarray | None = None
    other_tables: np.ndarray | None = None
    other_slots: np.ndarray | None = None
    prompt_prefixes: tuple[int, ...] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every request has one token, for which it samples: starts and logits_indices are then 0, 1, 2, …"""
        return len(self.token_ids) == len(self.seq_lens) == len(self.logits_indices) and self.tree_mask is None


_ARRAYS = [field.name for field in fields(StepArrays) if field.type == "np.ndarray"]
_NUMBERS = [field.name for field in fields(StepArrays) if field.type == "int"]


class BatchBuilder:
    """Builds the ForwardBatch of each step for one device and one block size."""

    def __init__(self, block_size: int, tables: BlockTables, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self.tables = tables
        self.max_blocks = tables.max_blocks
        self._table_step = 1 if device.type == "cpu" else TABLE_STEP

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

    def arrays(self, step: StepInput, sampled: SampledTokens | None = None) -> StepArrays:
        if len(step.token_ids) == len(step.sequence_ids) and not step.total_num_drafts and all(step.samples):
            return self._decode_arrays(step, sampled)
        computed = np.array(step.num_computed_tokens, dtype=np.int64)
        lengths = np.array(step.num_scheduled_tokens, dtype=np.int64)
        num_requests = len(lengths)
        tables = self.tables.gather(step.sequence_ids, self._table_step)
        query_start_loc = np.zeros(num_requests + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start_loc[1:])
        seq_lens = computed + lengths
        if num_requests == len(step.token_ids):  # decode only: one token per request
            request_of_token, positions = np.arange(num_requests), computed
        else:
            request_of_token = np.repeat(np.arange(num_requests), lengths)
            positions = np.arange(query_start_loc[-1]) + (computed - query_start_loc[:-1])[request_of_token]
        other_tables = self.tables.gather_others(step.sequence_ids, self._table_step)
        slots, other_slots = self._slots(tables, other_tables, request_of_token, positions)
        num_logits = np.array(step.samples, dtype=np.int64)
        if step.total_num_drafts:
            num_logits *= 1 + np.array(step.num_drafts, dtype=np.int64)
        num_decodes = num_short_queries(lengths)
        tree_mask = None
        if step.draft_parents:
            positions, tree_mask = _tree_rows(step, num_decodes, positions.copy())
        return StepArrays(
            token_ids=np.array(step.token_ids, dtype=np.int64),
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
            pending=_pending_tokens(step, query_start_loc, sampled),
            tree_mask=tree_mask,
            other_tables=other_tables,
            other_slots=other_slots,
            prompt_prefixes=tuple(computed[num_decodes:].tolist()),
        )

    def _decode_arrays(self, step: StepInput, sampled: SampledTokens | None) -> StepArrays:
        """`arrays` of a step in which every request has one token and samples, in a third of the operations."""
        count = len(step.token_ids)
        order, positions = np.arange(count), np.array(step.num_computed_tokens, dtype=np.int64)
        tables = self.tables.gather(step.sequence_ids, self._table_step)
        other_tables = self.tables.gather_others(step.sequence_ids, self._table_step)
        slots, other_slots = self._slots(tables, other_tables, order, positions)
        return StepArrays(
            token_ids=np.array(step.token_ids, dtype=np.int64),
            positions=positions,
            query_start_loc=np.arange(count + 1, dtype=np.int32),
            seq_lens=(positions + 1).astype(np.int32),
            block_tables=tables,
            slot_mapping=slots,
            logits_indices=order,
            max_query_len=1,
            max_seq_len=int(positions.max()) + 1,
            num_decode_requests=count,
            num_decode_tokens=count,
            max_decode_query_len=1,
            pending=_pending_tokens(step, order, sampled),
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
        token_ids[:count].copy_(sources if len(sources) == count else sources[:count])
        return
    places, sources = pack([pending.places, pending.sources], token_ids.device)
    token_ids.index_copy_(0, places, sampled.token_ids.index_select(0, sources))


def _pending_tokens(step: StepInput, query_start_loc: np.ndarray, sampled: SampledTokens | None) -> PendingRows:
    """Where tokens go that were sampled by the step before, and where they lie there."""
    count = len(step.pending)
    if not count:
        return NONE_PENDING
    assert sampled is not None, "a token that is not known, and no step that samples it"
    order = np.arange(count)
    if count == len(step.token_ids) and step.sequence_ids == sampled.sequence_ids:
        return PendingRows(order, order, True)
    rows, places = sampled.rows, query_start_loc[step.pending]
    sources = np.array([rows[step.sequence_ids[place]] for place in step.pending])
    return PendingRows(places, sources, np.array_equal(places, order) and np.array_equal(sources, order))
