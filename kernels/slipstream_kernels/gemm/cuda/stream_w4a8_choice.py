"""How the streaming W4A8 product cuts its work into tiles and runs: an estimate for each way.

Knows sizes only, no tensors.  The costs are in gemm/tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from slipstream_kernels.gemm.cuda.stream_plan import COUNTER_ROWS, TILE_COUNTERS, UNIT_ROWS
from slipstream_kernels.gemm.tuning import H200, Tuning


class Tile(NamedTuple):
    """rows: of weights.  columns: tokens.  is_exact: sums of groups are scaled in fp32; else weights are rounded."""

    rows: int
    columns: int
    is_exact: int


class Plan(NamedTuple):
    """Tile, and num_tiles, num_ctas and token_tiles as Plan of stream_plan has them."""

    rows: int
    columns: int
    is_exact: int
    num_tiles: int
    num_ctas: int
    token_tiles: int = 1

    @property
    def tile(self) -> Tile:
        return Tile(self.rows, self.columns, self.is_exact)

    @property
    def is_split(self) -> bool:
        """Whether CTAs share tiles, and add their sums through memory."""
        return self.num_tiles % self.num_ctas != 0

    @property
    def slot_floats(self) -> int:
        """Sums of a tile, which a CTA writes for others to add."""
        return self.rows * self.columns


# What is compiled (sm90_stream_w4a8.cu)
EXACT = tuple(Tile(*sizes, 1) for sizes in ((192, 80), (192, 96), (192, 112), (128, 80), (128, 96), (128, 128)))
ROUNDED = tuple(Tile(*sizes, 0) for sizes in ((192, 128), (192, 160), (192, 208), (128, 160), (128, 208), (128, 256)))
TILES = (*EXACT, *ROUNDED)
WARPGROUP_ROWS, CHUNK = 64, 128  # weight rows; summed columns
SUM_TOKENS = 128  # whose activation sums lie together
MAX_TOKENS = 512  # of all tiles (kMostTokens)


def tiles_for(num_tokens: int, out_features: int, tuning: Tuning = H200) -> list[Tile]:
    """Exact ones for few tokens or outputs; of those the ones that leave the fewest tokens empty, a multiple of 16."""
    is_exact = num_tokens <= most_exact_tokens(out_features, tuning)
    found = [tile for tile in (EXACT if is_exact else ROUNDED) if _fits(num_tokens, tile)]
    least = {rows: min(_padded(num_tokens, tile) for tile in found if tile.rows == rows) for rows, *_ in found}
    return [tile for tile in found if _padded(num_tokens, tile) == least[tile.rows]]


def most_exact_tokens(out_features: int, tuning: Tuning = H200) -> int:
    """Up to how many tokens are multiplied exactly with a weight of so many output features."""
    return max(count for count, most in tuning.exact_features.items() if out_features <= most)


def _padded(num_tokens: int, tile: Tile) -> int:
    return -(-num_tokens // tile.columns) * tile.columns


def _fits(num_tokens: int, tile: Tile) -> bool:
    if tile.is_exact and num_tokens > tile.columns and tile.columns != SUM_TOKENS:
        return False
    return _padded(num_tokens, tile) <= MAX_TOKENS


def plans(num_tokens: int, sizes: tuple[int, int], tile: Tile, most_ctas: int) -> Iterator[Plan]:
    """Ways to cut a product that may be the fastest.  sizes: output and input features.  most_ctas: that run at once.

    All CTAs with uneven runs; a whole number of CTAs to a tile; or of tiles, which may be smaller, to a CTA.
    """
    units, chunks = sizes[0] // UNIT_ROWS, sizes[1] // CHUNK
    token_tiles, of_rows = -(-num_tokens // tile.columns), -(-units * UNIT_ROWS // tile.rows)
    num_tiles = token_tiles * of_rows
    cuts = [(num_tiles, min(most_ctas, num_tiles * chunks))]
    if num_tiles >= most_ctas:
        rounds = -(-num_tiles // most_ctas)
        more = -(-most_ctas * rounds // token_tiles)
        if more <= units and more * token_tiles % most_ctas == 0:
            cuts.append((more * token_tiles, most_ctas))
        elif num_tiles % rounds == 0:
            cuts.append((num_tiles, num_tiles // rounds))
    else:
        most = min(most_ctas // num_tiles, chunks)
        cuts += [(num_tiles, num_tiles * count) for count in (most, max(1, most - 1))]
    for count, num_ctas in dict.fromkeys(cuts):
        plan = Plan(*tile, count, num_ctas, token_tiles)
        if not plan.is_split or TILE_COUNTERS * count <= sizes[0] // COUNTER_ROWS:
            yield plan


def choose(
    num_tokens: int, sizes: tuple[int, int], count_ctas: Callable[[Tile], int], tuning: Tuning = H200
) -> Plan | None:
    """The plan with the least estimate; None if there is none.

    count_ctas: how many CTAs with such tiles run at once; 0: they cannot run.
    """
    found = [
        plan
        for tile in tiles_for(num_tokens, sizes[0], tuning)
        if (most_ctas := count_ctas(tile))
        for plan in plans(num_tokens, sizes, tile, most_ctas)
    ]
    return min(found, key=lambda plan: estimate_us(plan, sizes[1] // CHUNK, tuning), default=None)


def estimate_us(plan: Plan, chunks: int, tuning: Tuning = H200) -> float:
    """Microseconds that the product takes.  chunks: of a tile."""
    costs = tuning.stream_w4a8
    of_chunk = costs.exact if plan.is_exact else costs.rounded
    warpgroups, longest = plan.rows // WARPGROUP_ROWS, -(-plan.num_tiles * chunks // plan.num_ctas)
    total = costs.start_us + -(-longest // chunks) * costs.segment_us
    total += longest * (of_chunk.chunk_us + warpgroups * (of_chunk.warpgroup_us + of_chunk.token_us * plan.columns))
    if plan.is_split:
        total += costs.split_us * warpgroups * plan.columns
        total += costs.uneven_us if plan.num_ctas % plan.num_tiles else 0.0
    return total
