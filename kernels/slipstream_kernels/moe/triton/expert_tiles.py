"""Tiles of rows that share an expert: how many a launch may have, and which one a program has.

How many rows an expert has is known on the device alone, so a launch has programs for the most tiles that so many rows
can make, and those without one end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


def most_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Tiles of at most block_m rows of one expert, if the rows are dealt out in the worst way."""
    begun = min(num_rows, num_experts)
    return begun + (num_rows - begun) // block_m


@triton.jit
def find_tile(offsets_ptr, tile, NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its first row in the tile, its last row + 1); expert is at least NUM_EXPERTS where there is no tile."""
    experts = tl.arange(0, EXPERTS_PADDED)
    begin = tl.load(offsets_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    end = tl.load(offsets_ptr + experts + 1, mask=experts < NUM_EXPERTS, other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    tiles_until = tl.cumsum(tiles, axis=0)
    expert = tl.sum((tiles_until <= tile).to(tl.int32), axis=0)
    is_mine = experts == expert
    first = tl.sum(tl.where(is_mine, begin + (tile - (tiles_until - tiles)) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(is_mine, end, 0), axis=0)
