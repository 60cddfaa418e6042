"""Which variant of the product by clusters is the fastest: an estimate for each, of what bounds it.

Knows sizes only, no tensors.  The constants are fitted to times on one H200 (docs/LOG.md): estimates order variants,
they do not predict times to better than a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

UNIT_ROWS = 16  # weight rows that go together
UNITS_PER_TILE = 8
CHUNK_BYTES = 128  # of a row, what a CTA multiplies at once

BYTES_PER_US = 4.1e6  # of weights, from memory
SM_BYTES_PER_US = 70e3  # into an SM, weights and activations
CLOCKS_PER_US = 1.6e3
START_US = 3.0
CHUNK_US = 0.2  # of each chunk, whatever its size
SUM_US = 2.0  # of adding what the CTAs of a cluster hold
SUM_BYTES_PER_US = 15e3


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


# (tiles, splits) of what is compiled (cluster_mm.cu), by columns and whether gated.
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


# Up to how many tokens it is the fastest product there is, by bytes of a weight and kind of output, on one H200
# (docs/LOG.md).
MAX_CHOSEN_TOKENS: dict[tuple[int, str], int] = {}
WIDE_FEATURES = 8192  # out_features from which each SM has weight rows enough to itself


def is_chosen(product: Product, weight_bytes: int) -> bool:
    """Whether it is the fastest product."""
    kind = "gated" if product.gated else "wide" if product.out_features >= WIDE_FEATURES else "narrow"
    return product.num_tokens <= MAX_CHOSEN_TOKENS.get((weight_bytes, kind), 0)


def choose(product: Product, count_clusters: Callable[[Variant], int]) -> Variant:
    """The variant with the least estimate.  count_clusters: how many of its clusters run at once; 0: it cannot run."""
    columns = next(columns for columns in COLUMNS if product.num_tokens <= columns)
    variants = [Variant(columns, *size) for size in COMPILED[columns, product.gated]]
    return min(variants, key=lambda variant: estimate_us(product, variant, count_clusters(variant)))


def estimate_us(product: Product, variant: Variant, num_clusters: int) -> float:
    """Microseconds that the product takes, infinite if the variant cannot make it."""
    if num_clusters == 0:
        return float("inf")
    units = -(-product.out_features // (UNIT_ROWS * num_clusters))
    passes = -(-units // (UNITS_PER_TILE * variant.tiles))
    if variant.splits > 1 and passes > 1:
        return float("inf")
    chunks = -(-product.row_bytes // (CHUNK_BYTES * variant.splits))
    rows = units * UNIT_ROWS + passes * product.num_tokens
    memory = product.out_features * product.row_bytes / BYTES_PER_US
    intake = chunks * rows * CHUNK_BYTES / SM_BYTES_PER_US
    products = passes * chunks * variant.tiles * 4 * variant.columns / CLOCKS_PER_US
    return START_US + passes * chunks * CHUNK_US + max(memory, intake, products) + sum_us(variant)


def sum_us(variant: Variant) -> float:
    """Of adding the sums of a cluster's CTAs."""
    if variant.splits == 1:
        return 0.0
    sent = variant.tiles * 128 * variant.columns * 4 * (variant.splits - 1) / variant.splits
    return SUM_US + sent / SUM_BYTES_PER_US
