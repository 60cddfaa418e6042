"""prepare_draft_inputs in Triton-lang: a program per request, one launch instead of torch's two dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.spec.prepare_draft_inputs import LevelPlaces, LevelRows
from slipstream_kernels.triton.step_kernel import step_kernel


def prepare_draft_inputs(
    positions: torch.Tensor,
    last: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    places: LevelPlaces,
    block_size: int,
    num_positions: int,
) -> LevelRows:
    """See ops.prepare_draft_inputs."""
    first, num_rows, rows_per_level = places
    count = last.shape[0]
    found = LevelRows(
        positions.new_empty(count * num_rows), positions.new_empty(count * num_rows), torch.empty_like(seq_lens)
    )
    _level_kernel[(count,)](
        positions,
        last,
        seq_lens,
        block_tables,
        *found,
        block_tables.stride(0),
        block_tables.shape[1],
        first,
        num_rows,
        rows_per_level,
        block_size,
        num_positions,
        ROWS=triton.next_power_of_2(num_rows),
        num_warps=1,
    )
    return found


@step_kernel
def _level_kernel(positions_ptr, last_ptr, seq_lens_ptr, tables_ptr, deep_ptr, slots_ptr, ends_ptr, table_stride,
                  table_width, first, num_rows, rows_per_level, block_size, num_positions,
                  ROWS: tl.constexpr):  # fmt: skip
    """Grid (requests)."""
    request = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    inside = rows < num_rows
    start = tl.load(positions_ptr + tl.load(last_ptr + request)) + 1 + first
    slots = start + rows
    columns = slots // block_size
    in_table = columns < table_width
    blocks = tl.load(tables_ptr + request * table_stride + columns, mask=inside & in_table, other=-1).to(tl.int64)
    is_there = ((blocks >= 0) & in_table) | (rows >= num_rows)
    is_whole = (tl.min(is_there.to(tl.int32), 0) > 0) & (tl.load(seq_lens_ptr + request) > 0)
    tl.store(
        slots_ptr + request * num_rows + rows, tl.where(is_whole, blocks * block_size + slots % block_size, -1), inside
    )
    deep = tl.minimum(start + rows // rows_per_level, num_positions - 1)
    tl.store(deep_ptr + request * num_rows + rows, deep, inside)
    tl.store(ends_ptr + request, tl.where(is_whole, start + num_rows, 0).to(tl.int32))
