"""How the streaming product cuts a weight into tiles and runs: an estimate for each way, of what bounds it.

Knows sizes only, no tensors.  The costs are in gemm/tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from slipstream_kernels.gemm.cuda.swap_ab_choice import CHUNK_BYTES, UNIT_ROWS, Product
from slipstream_kernels.gemm.tuning import H200, LibraryCosts, StreamCosts

# warpgroups of consumers, and units of a tile at most, of what is compiled (sm90_swap_ab_stream.cu), by columns
COMPILED = {64: ((1, 8), (2, 16)), 128: ((2, 8),), 256: ((2, 8),)}
COLUMNS = tuple(COMPILED)
MAX_TOKENS = COLUMNS[-1]
TILE_COUNTERS, COUNTER_ROWS = 4, 16  # counters of a split tile; a weight comes with one for so many rows
LIBRARY_ROWS, LIBRARY_COLUMNS = 128, (64, 128, 256)  # of a library's tile of results


class Variant(NamedTuple):
    """columns: tokens of a tile.  warpgroups: of consumers; a CTA of one takes half of an SM."""

    columns: int
    warpgroups: int


class Plan(NamedTuple):
    """num_tiles: of weight rows, of equal size.  num_ctas: they share the chunks of all tiles evenly."""

    columns: int
    warpgroups: int
    num_tiles: int
    num_ctas: int

    @property
    def is_split(self) -> bool:
        """Whether CTAs share tiles, and add their sums through memory."""
        return self.num_tiles % self.num_ctas != 0

    @property
    def slot_floats(self) -> int:
        """Sums of a tile, which a CTA writes for others to add."""
        return max_units(self.columns, self.warpgroups) * UNIT_ROWS * self.columns


def max_units(columns: int, warpgroups: int) -> int:
    """Units of a tile, at most."""
    return dict(COMPILED[columns])[warpgroups]


def columns_for(num_tokens: int) -> int:
    return next(columns for columns in COLUMNS if num_tokens <= columns)


def sums_bytes(num_sms: int) -> int:
    """The most that partial sums of a product take."""
    slots = [Plan(columns, warpgroups, 1, 2).slot_floats for columns in COLUMNS for warpgroups, _ in COMPILED[columns]]
    return 2 * num_sms * max(slots) * torch.float32.itemsize


def plans(product: Product, variant: Variant, most_ctas: int) -> Iterator[Plan]:
    """Ways to cut the product that may be the fastest.  most_ctas: that run at once.

    As few tiles as can be, or a whole number of CTAs to a tile or of tiles to a CTA, or all CTAs with uneven runs.
    """
    units, chunks = product.out_features // UNIT_ROWS, -(-product.row_bytes // CHUNK_BYTES)
    least = -(-units // max_units(*variant))
    sizes = [(least, most_ctas)]
    if least >= most_ctas:
        sizes.append((most_ctas * -(-least // most_ctas), most_ctas))
    else:
        for ctas in {most_ctas // least, max(1, most_ctas // least - 1)}:  # of a tile
            sizes += [(tiles, tiles * min(ctas, chunks)) for tiles in (least, most_ctas // ctas)]
    for num_tiles, num_ctas in dict.fromkeys(sizes):
        plan = Plan(*variant, num_tiles, min(num_ctas, num_tiles * chunks))
        has_counters = TILE_COUNTERS * num_tiles <= -(-product.out_features // COUNTER_ROWS)
        if num_tiles <= units and (has_counters or not plan.is_split):
            yield plan


def choose(
    product: Product, count_ctas: Callable[[Variant], int], costs: StreamCosts = H200.stream
) -> tuple[Plan, float] | None:
    """(the plan with the least estimate, microseconds); None if there is none.

    count_ctas: how many of a variant's CTAs run at once; 0: it cannot run.
    """
    columns = columns_for(product.num_tokens)
    found = []
    for warpgroups, _ in COMPILED[columns]:
        most_ctas = count_ctas(Variant(columns, warpgroups))
        if most_ctas:
            every = plans(product, Variant(columns, warpgroups), most_ctas)
            found += [(plan, estimate_us(product, plan, most_ctas, costs)) for plan in every]
    # Where memory bounds them alike, fewer tiles: the same tokens are read less often.
    return min(found, key=lambda pair: (pair[1], pair[0].num_tiles), default=None)


def estimate_us(product: Product, plan: Plan, most_ctas: int, costs: StreamCosts = H200.stream) -> float:
    """Microseconds that the product takes."""
    chunks = -(-product.row_bytes // CHUNK_BYTES)
    longest = -(-plan.num_tiles * chunks // plan.num_ctas)  # run
    rows = -(-product.out_features // (UNIT_ROWS * plan.num_tiles)) * UNIT_ROWS + plan.columns
    idle = 1 - plan.num_ctas / most_ctas
    memory = product.out_features * product.row_bytes / costs.bytes_per_us * (1 + costs.idle * idle)
    intake_rate = min(costs.cta_bytes_per_us, costs.sm_bytes_per_us * most_ctas / plan.num_ctas)
    intake = longest * rows * CHUNK_BYTES / intake_rate
    products = longest * plan.slot_floats * CHUNK_BYTES / costs.products_per_us
    total = costs.start_us + -(-longest // chunks) * costs.segment_us + max(memory, intake, products)
    if plan.is_split:
        total += 4 * plan.slot_floats / costs.sum_bytes_per_us
        total += costs.uneven_us if plan.num_ctas % plan.num_tiles else 0.0
    return total


def library_us(product: Product, num_sms: int, costs: LibraryCosts = H200.library) -> float:
    """Microseconds that the library takes: tiles of 128 weight rows and the best width, in waves."""
    chunks = -(-product.row_bytes // CHUNK_BYTES)

    def of_width(columns: int) -> float:
        tiles = -(-product.out_features // LIBRARY_ROWS) * -(-product.num_tokens // columns)
        intake = (LIBRARY_ROWS + columns) * CHUNK_BYTES * min(tiles, num_sms) / (costs.sm_bytes_per_us * num_sms)
        products = LIBRARY_ROWS * columns * CHUNK_BYTES / costs.products_per_us
        return costs.start_us + -(-tiles // num_sms) * chunks * max(intake, products)

    return min(of_width(columns) for columns in LIBRARY_COLUMNS)
