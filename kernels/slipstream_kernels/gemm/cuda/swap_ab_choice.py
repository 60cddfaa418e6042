"""Which variant of the product by clusters is the fastest: an estimate for each, of what bounds it.

Knows sizes only, no tensors.  The constants fit times on one H200 (docs/measurements): estimates order variants,
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


# Of how many tokens (first, last) it is the fastest product there is, by format of the weight and kind of product, on
# one H200 (docs/measurements); skinny_gemm is asked before. What is not named was slower or not measured.
CHOSEN_TOKENS = {
    ("plain", "gated"): ((17, 128),),
    ("plain", "wide"): ((17, 64),),
    ("channel", "gated"): ((17, 64),),
    ("channel", "wide"): ((17, 64),),
    ("channel", "long"): ((17, 128),),
    ("channel", "middle"): ((17, 32), (65, 128)),
    ("channel", "narrow"): ((65, 128),),
    ("block", "gated"): ((17, 64),),
}
MIDDLE_FEATURES, WIDE_FEATURES, MOST_FEATURES = 6144, 12288, 32768  # out_features
LONG_BYTES = 8192  # of a weight row


def is_chosen(product: Product, weights: str) -> bool:
    """Whether it is the fastest product.  weights: "plain" (16 bits), "channel" or "block" (e4m3, by its scales)."""
    if product.out_features > MOST_FEATURES:
        return False
    ranges = CHOSEN_TOKENS.get((weights, kind_of(product)), ())
    return any(first <= product.num_tokens <= last for first, last in ranges)


def chosen_columns(weights: str) -> list[int]:
    """The tiles' widths that are chosen for weights of the format."""
    ranges = [tokens for (name, _), all_ranges in CHOSEN_TOKENS.items() if name == weights for tokens in all_ranges]
    bounds = zip((0, *COLUMNS), COLUMNS)
    return [widest for below, widest in bounds if any(first <= widest and last > below for first, last in ranges)]


def kind_of(product: Product) -> str:
    """What decides how its work is shared out."""
    if product.gated:
        return "gated"
    if product.out_features >= WIDE_FEATURES:
        return "wide"
    if product.row_bytes >= LONG_BYTES:
        return "long"
    return "middle" if product.out_features >= MIDDLE_FEATURES else "narrow"


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
