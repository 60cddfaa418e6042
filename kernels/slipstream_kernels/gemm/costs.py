"""What the estimates of variants of products reckon with.  Data only; gemm/tuning.py has them for each GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapAbCosts:
    """What the estimates of swap_ab_choice reckon with.  They order variants, to no better than a tenth of a time.

    bytes_per_us: of weights from memory; sm_bytes_per_us: of all operands into one SM.  chunk_us: of each 128 bytes of
    a row, for any size.  sum_us, sum_bytes_per_us: adding the partial sums of a cluster's CTAs.
    """

    bytes_per_us: float = 4.1e6
    sm_bytes_per_us: float = 70e3
    clocks_per_us: float = 1.6e3
    start_us: float = 3.0
    chunk_us: float = 0.2
    sum_us: float = 2.0
    sum_bytes_per_us: float = 15e3


@dataclass(frozen=True)
class StreamCosts:
    """What the estimates of swap_ab_stream_choice reckon with, fitted to 148 times of one H200 (docs/measurements).

    sm_bytes_per_us: operands into all SMs, by their number; fewer CTAs have more each, up to cta_bytes_per_us.
    idle: of memory's time, for each part of the SMs without a CTA.  products_per_us: of one SM.  segment_us: of each
    tile of a CTA, written at its end.  sum_bytes_per_us: of a CTA's partial sums, written and added.  uneven_us: where
    runs end inside of tiles.
    """

    bytes_per_us: float = 4.57e6
    sm_bytes_per_us: float = 64.2e3
    cta_bytes_per_us: float = 78e3
    products_per_us: float = 7e6
    start_us: float = 3.1
    segment_us: float = 2.1
    sum_bytes_per_us: float = 18.8e3
    uneven_us: float = 2.7
    idle: float = 0.67


@dataclass(frozen=True)
class StreamW4A16Costs:
    """What the estimates of stream_w4a16_choice reckon with, fitted to 1,700 times of one H200 (docs/measurements).

    chunk_us, and token_us for each token of a tile: of a chunk.  split_us: of each token of a tile whose sums CTAs add.
    uneven_us: where runs end inside of tiles.
    """

    chunk_us: float = 0.47
    token_us: float = 4.0e-3
    split_us: float = 46.9e-3
    uneven_us: float = 3.3


@dataclass(frozen=True)
class ChunkCosts:
    """Of 128 summed columns: of a tile, of each of its warpgroups (64 weight rows), and of each token of these."""

    chunk_us: float
    warpgroup_us: float
    token_us: float


@dataclass(frozen=True)
class StreamW4A8Costs:
    """What the estimates of stream_w4a8_choice reckon with, fitted to 1,700 times of one H200 (docs/measurements).

    exact, rounded: by the kind of tile.  segment_us: of each tile of a CTA.  split_us: of each token and warpgroup of a
    tile whose sums CTAs add.  uneven_us: where runs end inside of tiles.
    """

    exact: ChunkCosts = ChunkCosts(0.225, -9.2e-3, 1.79e-3)
    rounded: ChunkCosts = ChunkCosts(0.142, 0.124, 0.96e-3)
    start_us: float = 2.3
    segment_us: float = 1.5
    split_us: float = 18.9e-3
    uneven_us: float = 3.5
