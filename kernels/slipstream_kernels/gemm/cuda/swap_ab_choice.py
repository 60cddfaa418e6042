"""Which variant of the product by clusters is the fastest: an estimate for each, of what bounds it.

Knows sizes only, no tensors.  The costs are in gemm/tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from slipstream_kernels.gemm.costs import SwapAbCosts
from slipstream_kernels.gemm.tuning import H200

UNIT_ROWS = 16  # weight rows that go together
UNITS_PER_TILE = 8
CHUNK_BYTES = 128  # of a row, what a CTA multiplies at once


class Variant(NamedTuple):
    """columns: tokens of a tile.  tiles: of 128 weight rows.

    splits: CTAs of a cluster, that share the summed dimension.
    """

    columns: int
    tiles: int
    splits: int


class Product(NamedTuple):
    """out_features: weight rows.  row_bytes: of a weight row."""

    num_tokens: int
    out_features: int
    row_bytes: int
    gated: bool


# (tiles, splits) of what is compiled (sm90_swap_ab_gemm.cu), by columns and whether gated.
SMALL = ((1, 1), (2, 1), (1, 2), (2, 2))
MIDDLE = (*SMALL, (1, 4), (2, 4))
COMPILED = {
    (16, False): SMALL,
    **{(columns, False): MIDDLE for columns in (32, 64, 128)},
    (256, False): ((1, 1), (1, 2)),
    **{(columns, True): ((2, 1),) for columns in (16, 32, 64, 128)},
    (256, True): ((1, 1),),
}
COLUMNS = tuple(sorted({columns for columns, _ in COMPILED}))
MAX_TOKENS = COLUMNS[-1]


def columns_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The widths of the tiles that so many tokens (first, last) need."""
    bounds = list(zip((0, *COLUMNS), COLUMNS))
    return [widest for below, widest in bounds if any(first <= widest and last > below for first, last in ranges)]


def choose(product: Product, count_clusters: Callable[[Variant], int], costs: SwapAbCosts = H200.swap_ab) -> Variant:
    """The variant with the least estimate.  count_clusters: how many of its clusters run at once; 0: it cannot run."""
    columns = next(columns for columns in COLUMNS if product.num_tokens <= columns)
    variants = [Variant(columns, *size) for size in COMPILED[columns, product.gated]]
    if columns < 32 and not product.gated:  # a cluster's CTAs finish 8 tokens each, so that four need a tile of 32
        variants += [Variant(32, *size) for size in COMPILED[32, False] if size[1] == 4]
    return min(variants, key=lambda variant: estimate_us(product, variant, count_clusters(variant), costs))


def estimate_us(product: Product, variant: Variant, num_clusters: int, costs: SwapAbCosts = H200.swap_ab) -> float:
    """Microseconds that the product takes, infinite if the variant cannot make it."""
    if num_clusters == 0:
        return float("inf")
    units = -(-product.out_features // (UNIT_ROWS * num_clusters))
    passes = -(-units // (UNITS_PER_TILE * variant.tiles))
    if variant.splits > 1 and passes > 1:
        return float("inf")
    chunks = -(-product.row_bytes // (CHUNK_BYTES * variant.splits))
    rows = units * UNIT_ROWS + passes * product.num_tokens
    memory = product.out_features * product.row_bytes / costs.bytes_per_us
    intake = chunks * rows * CHUNK_BYTES / costs.sm_bytes_per_us
    products = passes * chunks * variant.tiles * 4 * variant.columns / costs.clocks_per_us
    return costs.start_us + passes * chunks * costs.chunk_us + max(memory, intake, products) + sum_us(variant, costs)


def sum_us(variant: Variant, costs: SwapAbCosts) -> float:
    """Microseconds of adding the partial sums of a cluster's CTAs."""
    if variant.splits == 1:
        return 0.0
    sent = variant.tiles * 128 * variant.columns * 4 * (variant.splits - 1) / variant.splits
    return costs.sum_us + sent / costs.sum_bytes_per_us
