"""The tile of rows that a program multiplies, all of one expert.

How many rows an expert has is known on the device alone: a launch has programs for Routing.max_tiles tiles, and those
without a tile end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
