"""Block tables of all requests that the worker knows, kept between steps. Engine thread. Arrays only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np

from slipstream.core.kv_groups import ONE_GROUP, KVGroups

# On CUDA block tables are multiples of this wide: kernels are compiled once, for strides that 16 divides.
TABLE_STEP = 16

T = TypeVar("T")


def values_of(known: Mapping[int, T] | Sequence[T], keys: Sequence[int]) -> Sequence[T]:
    """The value of each key or index, in a third of a comprehension's time."""
    return itemgetter(*keys)(known) if len(keys) > 1 else [known[key] for key in keys]


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
        self._num_blocks = [0] * num_rows  # of the full groups
        self._num_window_blocks = [0] * num_rows
        self._rows: dict[int, int] = {}  # by request id
        self._free = list(range(num_rows))
        self._flat = memoryview(self._table[0].reshape(-1))  # type: ignore[arg-type]  # where Python writes one number
        self._last_ids: Sequence[int] = ()
        self._last_row_numbers: Sequence[int] = ()
        self._last_rows = np.zeros(0, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return self._table.shape[1]

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
        if self.groups.num_groups == 1:
            count, last_count = len(block_ids), self._num_blocks[row]
            if count > self.max_blocks:
                raise ValueError(f"{count} blocks, but a row has room for {self.max_blocks}")
            self._table[0, row, :count] = block_ids
            if last_count > count:  # behind it all are -1
                self._table[0, row, count:last_count] = -1
            self._num_blocks[row] = count
            return
        longest = max(self._num_blocks[row], self._num_window_blocks[row])
        self._table[:, row, :longest] = -1
        self._num_blocks[row] = self._num_window_blocks[row] = 0
        self.extend(sequence_id, block_ids)
        self.extend_windows(sequence_id, window_block_ids)

    def extend(self, sequence_id: int, block_ids: Sequence[int]) -> None:
        row = self._rows.get(sequence_id)
        if row is not None:
            table, start = self._table[: self.groups.num_full, row], self._num_blocks[row]
            self._num_blocks[row] += _append(table, start, block_ids)

    def extend_all(self, block_ids: Mapping[int, Sequence[int]]) -> None:
        """`extend` by sequence id. Nearly all have one new block, which is written without NumPy."""
        rows, flat, counts, most = self._rows, self._flat, self._num_blocks, self.max_blocks
        are_single = self.groups.num_full == 1
        for sequence_id, new_ids in block_ids.items():
            if not (are_single and len(new_ids) == 1):
                self.extend(sequence_id, new_ids)
            elif (row := rows.get(sequence_id)) is not None:
                count = counts[row]
                if count >= most:  # behind it lies another request's row
                    raise ValueError(f"a row has room for {most} blocks, and is full")
                flat[row * most + count] = new_ids[0]
                counts[row] = count + 1

    def extend_windows(self, sequence_id: int, window_block_ids: Sequence[int]) -> None:
        row = self._rows.get(sequence_id)
        if row is not None and len(window_block_ids):
            table, start = self._table[self.groups.num_full :, row], self._num_window_blocks[row]
            self._num_window_blocks[row] += _append(table, start, window_block_ids)

    def drop(self, sequence_ids: Iterable[int]) -> None:
        self._last_ids = ()
        self._free += [self._rows.pop(sequence_id) for sequence_id in sequence_ids if sequence_id in self._rows]

    def gather(self, sequence_ids: Sequence[int], width_step: int = 1, num_more: int = 0) -> np.ndarray:
        """Tables of the first group: [num_requests, longest up to a multiple of width_step] int32, -1 pads.

        num_more: columns behind the longest table in which no block is to be found; max_blocks are the most.
        A copy, which the caller may keep."""
        rows, width = self._rows_and_width(sequence_ids, width_step, num_more)
        return self._table[0][rows, :width]

    def gather_others(self, sequence_ids: Sequence[int], width_step: int = 1, num_more: int = 0) -> np.ndarray | None:
        """Tables of the other groups, as wide: [num_groups - 1, num_requests, width]; None if there are none."""
        if self.groups.num_groups == 1:
            return None
        rows, width = self._rows_and_width(sequence_ids, width_step, num_more)
        return np.stack([table[rows, :width] for table in self._table[1:]])

    def rows(self, sequence_ids: Sequence[int]) -> np.ndarray:
        """The rows of requests, which no others have while these are known: [num_requests] int64, below num_rows."""
        if not self._last_ids or sequence_ids != self._last_ids:
            self._last_row_numbers = values_of(self._rows, sequence_ids)
            self._last_rows = np.array(self._last_row_numbers, dtype=np.int64)
            self._last_ids = sequence_ids
        return self._last_rows

    def _rows_and_width(self, sequence_ids: Sequence[int], width_step: int, num_more: int) -> tuple[np.ndarray, int]:
        rows = self.rows(sequence_ids)
        longest = max(1, *values_of(self._num_blocks, self._last_row_numbers))
        return rows, -(-(longest + num_more) // width_step) * width_step

    def _new_row(self) -> int:
        if not self._free:  # preempted requests keep theirs until they come back
            size = self._table.shape[1]
            self._table = np.concatenate([self._table, np.full_like(self._table, -1)], axis=1)
            self._flat = memoryview(self._table[0].reshape(-1))  # type: ignore[arg-type]
            self._num_blocks += [0] * size
            self._num_window_blocks += [0] * size
            self._free = list(range(size, 2 * size))
        return self._free.pop()


def _append(table: np.ndarray, start: int, block_ids: Sequence[int]) -> int:
    """Write blocks, in which the table's groups take turns, from index `start` on. Returns how many each got."""
    num_groups = len(table)
    if num_groups == 1:
        table[0, start : start + len(block_ids)] = block_ids
        return len(block_ids)
    count = len(block_ids) // num_groups
    table[:, start : start + count] = np.array(block_ids, dtype=np.int32).reshape(count, num_groups).T
    return count
