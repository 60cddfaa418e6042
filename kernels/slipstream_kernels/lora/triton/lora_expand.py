"""lora_expand in Triton-lang: a program adds to a tile of rows and a block of columns of one part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

import torch
import triton
import triton.language as tl

from slipstream_kernels.lora.lora_expand import MAX_PARTS
from slipstream_kernels.lora.tiles import AdapterTiles
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot_onto, padded_width
from slipstream_kernels.triton.step_kernel import step_kernel

MAX_RANKS = 64  # that a program holds at once
BLOCK_COLUMNS, WIDE_BLOCK_COLUMNS = 128, 256
WIDE = 16384  # columns of a product from which on wide blocks are as many as an H200 runs at once
ALIGNMENT = 16  # columns: of wide loads


@step_kernel
def _lora_expand_kernel(
    y_ptr,
    inner_ptr,
    b_ptr,
    slots_ptr,
    rows_ptr,
    y_row_stride,
    out_features,
    num_tiles,
    num_parts,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    END_3: tl.constexpr,
    ALIGN: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    block, tile = tl.program_id(0), tl.program_id(1)
    # blocks of columns do not cross parts
    BLOCKS_0: tl.constexpr = tl.cdiv(END_0, BLOCK_COLUMNS)
    BLOCKS_1: tl.constexpr = BLOCKS_0 + tl.cdiv(END_1 - END_0, BLOCK_COLUMNS)
    BLOCKS_2: tl.constexpr = BLOCKS_1 + tl.cdiv(END_2 - END_1, BLOCK_COLUMNS)
    part = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32) + (block >= BLOCKS_2).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, BLOCKS_0, tl.where(part == 2, BLOCKS_1, BLOCKS_2)))
    start = tl.where(part == 0, 0, tl.where(part == 1, END_0, tl.where(part == 2, END_1, END_2)))
    end = tl.where(part == 0, END_0, tl.where(part == 1, END_1, tl.where(part == 2, END_2, END_3)))
    first = tl.multiple_of(start + (block - before) * BLOCK_COLUMNS, ALIGN)
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < end
    ranks = tl.arange(0, BLOCK_RANKS)
    # an adapter and the tiles are written by copies alone: both are read before the previous kernel has ended
    slot = tl.load(slots_ptr + tile)
    b_rows = b_ptr + (slot.to(tl.int64) * RANK + ranks)[:, None] * out_features + columns[None, :]
    own_rank = tl.where(slot >= 0, RANK, 0)
    b = tl.load(b_rows, mask=is_column[None, :] & (ranks < own_rank)[:, None], other=0.0)
    positions = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    rows = tl.load(rows_ptr + positions)
    await_previous(DEPENDENT)
    if slot >= 0:
        mask = (rows >= 0)[:, None] & is_column[None, :]
        y_tile = y_ptr + rows.to(tl.int64)[:, None] * y_row_stride + columns[None, :]
        y = tl.load(y_tile, mask=mask, other=0.0)
        added = tl.zeros((TILE_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        for first_rank in range(0, RANK, BLOCK_RANKS):
            inner = tl.zeros((TILE_ROWS, BLOCK_RANKS), dtype=tl.float32)
            for of_sum in tl.static_range(NUM_SUMS):
                sums = (of_sum * num_parts + part) * num_tiles * TILE_ROWS + positions
                own = inner_ptr + sums.to(tl.int64)[:, None] * RANK + ranks[None, :]
                inner += tl.load(own, mask=(ranks < RANK)[None, :], other=0.0)
            added = dot_onto(added, inner.to(b.dtype), b)
            if first_rank + BLOCK_RANKS < RANK:
                ranks += BLOCK_RANKS
                b_rows += BLOCK_RANKS * out_features
                b = tl.load(b_rows, mask=is_column[None, :] & (ranks < own_rank)[:, None], other=0.0)
        tl.store(y_tile, (y.to(tl.float32) + added).to(y.dtype), mask=mask)


def lora_expand(
    y: torch.Tensor, inner: torch.Tensor, b: torch.Tensor, tiles: AdapterTiles, part_sizes: Sequence[int]
) -> torch.Tensor:
    """See ops.lora_expand."""
    num_tiles, rows_of_tile = tiles.rows.shape
    num_sums, num_parts, _, rank = inner.shape
    ends = [*accumulate(part_sizes)]
    ends += ends[-1:] * (MAX_PARTS - len(ends))
    block_columns = BLOCK_COLUMNS if b.shape[2] < WIDE else WIDE_BLOCK_COLUMNS
    num_blocks = sum(triton.cdiv(size, block_columns) for size in part_sizes)
    _lora_expand_kernel[(num_blocks, num_tiles)](
        y, inner, b, tiles.slots, tiles.rows, y.stride(0), b.shape[2], num_tiles, num_parts,
        END_0=ends[0], END_1=ends[1], END_2=ends[2], END_3=ends[3], ALIGN=gcd(ALIGNMENT, *ends), NUM_SUMS=num_sums,
        RANK=rank, TILE_ROWS=rows_of_tile, BLOCK_RANKS=min(padded_width(rank), MAX_RANKS),
        BLOCK_COLUMNS=block_columns, num_warps=4, **dependent_launch(y.device),
    )  # fmt: skip
    return y
