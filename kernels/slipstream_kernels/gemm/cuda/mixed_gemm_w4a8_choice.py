"""Which variant of mixed_gemm_w4a8 is the fastest, by the sizes of a product.  Knows sizes only, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from slipstream_kernels.gemm.tuning import H200, Tuning

TILE, BLOCK = 16, 128  # output features of a tile, input features of a block
COLUMNS = (8, 16, 32, 48, 64, 96, 128)  # tokens of a tile that are compiled; others are rounded up
MAX_TOKENS = 64  # of every weight; more of those with few output features
WARPGROUPS_M = (1, 2, 4)
MAX_WARPGROUPS_M = WARPGROUPS_M[-1]
MAX_WIDE_WARPGROUPS_M = 2  # of more than MAX_TOKENS
GROUP_TILES = 4  # tiles of a warpgroup
SPLITS = tuple(range(1, 9))


class Variant(NamedTuple):
    """columns: tokens of a tile.  warpgroups_m: 64 output features each, that a CTA has at once.

    splits: CTAs of a cluster, which split the input features.  token_tiles: tiles of tokens, each of other clusters.
    """

    columns: int
    warpgroups_m: int
    splits: int
    token_tiles: int = 1


def tiles_of(num_tokens: int) -> tuple[int, int]:
    """(tokens of a tile, number of tiles).  Only the widest may be several; no tokens take a tile, too."""
    token_tiles = max(1, -(-num_tokens // COLUMNS[-1]))
    if token_tiles > 1:
        return COLUMNS[-1], token_tiles
    return next(count for count in COLUMNS if count >= num_tokens), token_tiles


def choose(
    num_tokens: int, sizes: tuple[int, int], count_clusters: Callable[[Variant], int], tuning: Tuning = H200
) -> Variant | None:
    """The first of the ordered variants that fits; else the one whose CTAs go over their output features in passes.

    sizes: output and input features.  count_clusters: how many of a variant's clusters run at once; 0: it cannot run.
    None: so many tokens are not multiplied here, or other kernels are faster.
    """
    if num_tokens > most_tokens(sizes, tuning):
        return None
    (columns, token_tiles), tiles, blocks = tiles_of(num_tokens), sizes[0] // TILE, sizes[1] // BLOCK
    ordered = next(choices for count, choices in tuning.mixed_gemm_w4a8.items() if columns * token_tiles <= count)
    for warpgroups_m, splits, least, most in ordered:
        variant = Variant(columns, warpgroups_m, splits, token_tiles)
        clusters = count_clusters(variant) // token_tiles
        if max(splits, least) <= blocks <= most and tiles <= clusters * GROUP_TILES * warpgroups_m:
            return variant
    return Variant(columns, MAX_WARPGROUPS_M, 1) if columns <= MAX_TOKENS else None


def most_tokens(sizes: tuple[int, int], tuning: Tuning = H200) -> int:
    """Up to how many tokens are multiplied here with a weight of such sizes: for more, other kernels are faster."""
    features, summed = sizes
    found = (
        count
        for count, (most, ratio) in tuning.narrow_features.items()
        if features <= most and summed >= ratio * features
    )
    return max((MAX_TOKENS, *found))
