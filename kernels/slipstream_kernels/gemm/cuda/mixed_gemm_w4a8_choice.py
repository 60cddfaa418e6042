"""Which variant of mixed_gemm_w4a8 is the fastest, by the sizes of a product.  Knows sizes only, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

STRIP, BLOCK = 16, 128  # output features of a strip, input features of a block
COLUMNS = (8, 16, 32, 48, 64, 96, 128)  # numbers of tokens that are compiled; others are rounded up
MAX_TOKENS = 64  # of every weight; more of those with few output features
NARROW_FEATURES = 6144
WARPGROUPS_M = (1, 2, 4)
MOST_WARPGROUPS_M = WARPGROUPS_M[-1]
MOST_MANY_WARPGROUPS_M = 2  # of more than MAX_TOKENS
GROUP_STRIPS = 4  # of a row group
SPLITS = tuple(range(1, 9))


class Variant(NamedTuple):
    """columns: tokens of a tile.  warpgroups_m: 64 output features each, that a CTA has at once.

    splits: CTAs of a cluster, which share the input features.
    """

    columns: int
    warpgroups_m: int
    splits: int


class Choice(NamedTuple):
    """A variant's warpgroups_m and splits, for rows of input features of from `least` to `most` blocks."""

    warpgroups_m: int
    splits: int
    least: int = 1
    most: int = 1 << 16


# CTAs that have all output features at once: the fastest first, up to so many tokens, on one H200 (docs/measurements).
ORDERED = {
    64: (Choice(1, 2), Choice(4, 4, 65), Choice(2, 2, 65), Choice(1, 1), Choice(4, 2, 64), Choice(2, 1)),
    128: (Choice(1, 2), Choice(1, 1, most=64), Choice(2, 2)),
}


def columns_of(num_tokens: int) -> int:
    """Tokens that are multiplied where so many are wanted."""
    return next(count for count in COLUMNS if count >= num_tokens)


def choose(num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int]) -> Variant | None:
    """The first of the ordered variants that fits; else the one whose CTAs go over their output features in passes.

    sizes: output and input features.  count_clusters: how many of a variant's clusters run at once; 0: it cannot run.
    None: so many tokens are not multiplied here, or other kernels are faster.
    """
    if num_tokens > MAX_TOKENS and (num_tokens > COLUMNS[-1] or sizes[0] > NARROW_FEATURES):
        return None
    columns, strips, blocks = columns_of(num_tokens), sizes[0] // STRIP, sizes[1] // BLOCK
    for warpgroups_m, splits, least, most in next(choices for count, choices in ORDERED.items() if columns <= count):
        variant = Variant(columns, warpgroups_m, splits)
        if max(splits, least) <= blocks <= most and strips <= count_clusters(variant) * GROUP_STRIPS * warpgroups_m:
            return variant
    return Variant(columns, MOST_WARPGROUPS_M, 1) if columns <= MAX_TOKENS else None
