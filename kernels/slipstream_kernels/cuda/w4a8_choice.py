"""Which variant of w4a8_stream is the fastest, by the sizes of a product.  Knows sizes only, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

STRIP, BLOCK = 16, 128  # output features of a strip, input features of a block
COLUMNS = (8, 16, 32, 48, 64)  # numbers of tokens that are compiled; others are rounded up
MAX_TOKENS = COLUMNS[-1]
ROW_GROUPS = (1, 2, 4)
MOST_ROW_GROUPS = ROW_GROUPS[-1]
GROUP_STRIPS = 4  # of a row group
SPLITS = tuple(range(1, 9))


class Variant(NamedTuple):
    """columns: tokens of a tile.  row_groups: 64 output features each, that a CTA has at once.

    splits: CTAs of a cluster, which share the input features.
    """

    columns: int
    row_groups: int
    splits: int


# (row_groups, splits) of CTAs that have all output features at once, the fastest first, on one H200 (docs/LOG.md).
ORDERED = ((1, 2), (1, 1), (2, 1))


def columns_of(num_tokens: int) -> int:
    """Tokens that are multiplied where so many are wanted."""
    return next(count for count in COLUMNS if count >= num_tokens)


def choose(num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int]) -> Variant:
    """The first of the ordered variants that fits; else the one whose CTAs go over their output features in passes.

    sizes: output and input features.  count_clusters: how many of a variant's clusters run at once; 0: it cannot run.
    """
    columns, strips, blocks = columns_of(num_tokens), sizes[0] // STRIP, sizes[1] // BLOCK
    for row_groups, splits in ORDERED:
        variant = Variant(columns, row_groups, splits)
        if splits <= blocks and strips <= count_clusters(variant) * GROUP_STRIPS * row_groups:
            return variant
    return Variant(columns, MOST_ROW_GROUPS, 1)
