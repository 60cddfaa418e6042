"""Variants of mixed_gemm for 4-bit weights on an H200, the fastest first, by how many tokens they multiply at once.

The first that fits is taken: tuning.py says what the numbers are.  tests/golden/mixed_gemm_times.json has the times
that they were ordered by.
"""

from __future__ import annotations

from collections.abc import Mapping

MOST_ROWS = 1 << 31
MANY_BLOCKS = 1 << 16

MIXED_GEMM_W4A8: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    8: (
        (2, 4, 49, 96),
        (4, 5, 33, MANY_BLOCKS),
        (4, 3, 129, MANY_BLOCKS),
        (4, 2, 49, MANY_BLOCKS),
        (1, 2, 1, 64),
        (1, 1, 1, 32),
        (2, 1, 1, 48),
    ),
    16: (
        (4, 8, 49, MANY_BLOCKS),
        (1, 2, 1, 96),
        (4, 5, 33, MANY_BLOCKS),
        (1, 1, 1, 48),
        (4, 3, 1, MANY_BLOCKS),
        (4, 2, 33, 128),
        (2, 1, 1, 128),
    ),
    32: (
        (4, 7, 129, MANY_BLOCKS),
        (4, 5, 33, MANY_BLOCKS),
        (4, 3, 49, MANY_BLOCKS),
        (4, 2, 33, 128),
        (1, 2, 1, 64),
        (1, 1, 1, 32),
    ),
    64: (
        (4, 5, 33, 64),
        (1, 2, 49, 128),
        (4, 4, 1, 128),
        (4, 8, 129, MANY_BLOCKS),
        (2, 2, 49, MANY_BLOCKS),
        (4, 2, 33, 96),
    ),
    96: (
        (2, 6, 1, 128),
        (2, 4, 33, MANY_BLOCKS),
        (1, 2, 1, 128),
        (2, 3, 1, 96),
        (2, 2, 1, MANY_BLOCKS),
        (1, 1, 1, MANY_BLOCKS),
    ),
    128: (
        (2, 6, 1, 96),
        (2, 4, 1, MANY_BLOCKS),
        (1, 2, 1, MANY_BLOCKS),
        (2, 2, 49, MANY_BLOCKS),
        (2, 3, 1, 96),
        (1, 1, 1, 128),
    ),
    256: ((1, 2, 1, MANY_BLOCKS), (2, 2, 1, MANY_BLOCKS)),
}

MIXED_GEMM_W4A16: Mapping[int, tuple[tuple[int, int, int, int, int], ...]] = {
    32: ((32, 1, 2, 1, MANY_BLOCKS), (32, 1, 1, 1, MANY_BLOCKS), (32, 2, 1, 1, MANY_BLOCKS)),
    48: (
        (64, 1, 2, 65, MANY_BLOCKS),
        (64, 2, 2, 65, MANY_BLOCKS),
        (64, 4, 4, 1, 64),
        (64, 4, 3, 1, 64),
        (64, 2, 1, 1, MANY_BLOCKS),
    ),
    64: (
        (32, 1, 1, 1, 32),
        (64, 2, 4, 129, MANY_BLOCKS),
        (64, 2, 2, 65, MANY_BLOCKS),
        (64, 4, 4, 1, 64),
        (64, 4, 3, 1, 64),
        (64, 2, 1, 1, MANY_BLOCKS),
    ),
    96: (
        (128, 2, 4, 129, MANY_BLOCKS),
        (128, 2, 2, 65, 128),
        (128, 4, 5, 1, 64),
        (128, 4, 4, 1, MANY_BLOCKS),
        (128, 4, 3, 1, MANY_BLOCKS),
    ),
    128: ((128, 4, 5, 29, 128), (128, 4, 4, 1, MANY_BLOCKS), (128, 4, 3, 1, MANY_BLOCKS)),
    MOST_ROWS: ((128, 4, 4, 1, MANY_BLOCKS), (128, 4, 2, 1, MANY_BLOCKS)),
}

MIXED_GEMM_PAIRS: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    32: (
        (4, 8, 49, MANY_BLOCKS),
        (1, 2, 1, MANY_BLOCKS),
        (4, 5, 65, 128),
        (1, 1, 1, MANY_BLOCKS),
        (2, 1, 1, 32),
        (4, 2, 33, 96),
    ),
    64: (
        (4, 5, 65, 128),
        (4, 8, 33, MANY_BLOCKS),
        (1, 2, 1, 128),
        (4, 4, 33, 128),
        (1, 1, 1, MANY_BLOCKS),
        (4, 2, 33, MANY_BLOCKS),
        (4, 4, 1, MANY_BLOCKS),
        (2, 1, 1, MANY_BLOCKS),
    ),
}
