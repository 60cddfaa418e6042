"""lora_shrink in Triton-lang: a program sums a share of the features, for a tile of rows and some of the ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.lora.tiles import AdapterTiles
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot_onto, padded_width
from slipstream_kernels.triton.step_kernel import step_kernel

MAX_RANKS = 64  # of a program: more take more programs
TILE_ELEMENTS = 8192  # of A that a program holds at once
MAX_SUMS = 16  # partial sums, which lora_expand adds up
NUM_PROGRAMS = 512  # enough to keep every SM loading
MIN_FEATURES = 512  # of a partial sum: fewer cost more to add up than they save


@step_kernel
def _lora_shrink_kernel(
    x_ptr,
    a_ptr,
    slots_ptr,
    rows_ptr,
    inner_ptr,
    x_row_stride,
    a_part_stride,
    in_features,
    features_per_sum,
    num_tiles,
    num_parts,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    tile, of_sum = tl.program_id(0), tl.program_id(1)
    RANK_BLOCKS: tl.constexpr = (RANK + BLOCK_RANKS - 1) // BLOCK_RANKS
    part = tl.program_id(2) // RANK_BLOCKS
    ranks = (tl.program_id(2) % RANK_BLOCKS) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    # an adapter and the tiles are written by copies alone: both are read before the previous kernel has ended
    slot = tl.load(slots_ptr + tile)
    first = of_sum * features_per_sum
    end = tl.minimum(first + features_per_sum, in_features)
    features = first + tl.arange(0, BLOCK_FEATURES)
    a_rows = a_ptr + part.to(tl.int64) * a_part_stride + (slot.to(tl.int64) * RANK + ranks)[:, None] * in_features
    a_mask = (ranks < tl.where(slot >= 0, RANK, 0))[:, None]
    a = tl.load(a_rows + features[None, :], mask=a_mask & (features < end)[None, :], other=0.0)
    positions = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    rows = tl.load(rows_ptr + positions)
    await_previous(DEPENDENT)
    if slot >= 0:
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride
        inner = tl.zeros((TILE_ROWS, BLOCK_RANKS), dtype=tl.float32)
        for _ in range(first, end, BLOCK_FEATURES):
            mask = (rows >= 0)[:, None] & (features < end)[None, :]
            x = tl.load(x_rows + features[None, :], mask=mask, other=0.0)
            inner = dot_onto(inner, x, tl.trans(a))
            features += BLOCK_FEATURES
            a = tl.load(a_rows + features[None, :], mask=a_mask & (features < end)[None, :], other=0.0)
        sums = (of_sum * num_parts + part) * num_tiles * TILE_ROWS + positions
        out = inner_ptr + sums.to(tl.int64)[:, None] * RANK + ranks[None, :]
        tl.store(out, inner, mask=(ranks < RANK)[None, :])


def lora_shrink(x: torch.Tensor, a: torch.Tensor, tiles: AdapterTiles) -> torch.Tensor:
    """See ops.lora_shrink."""
    num_parts, _, rank, in_features = a.shape
    num_tiles, rows_of_tile = tiles.rows.shape
    block_ranks = min(padded_width(rank), MAX_RANKS)
    block_features = TILE_ELEMENTS // max(block_ranks, rows_of_tile)
    last_programs = num_parts * triton.cdiv(rank, block_ranks)
    num_sums = max(1, min(MAX_SUMS, in_features // MIN_FEATURES, NUM_PROGRAMS // (num_tiles * last_programs)))
    features_per_sum = triton.cdiv(in_features, num_sums * block_features) * block_features
    num_sums = triton.cdiv(in_features, features_per_sum)
    inner = torch.empty((num_sums, num_parts, tiles.rows.numel(), rank), dtype=torch.float32, device=x.device)
    _lora_shrink_kernel[(num_tiles, num_sums, last_programs)](
        x, a, tiles.slots, tiles.rows, inner, x.stride(0), a.stride(0), in_features, features_per_sum, num_tiles,
        num_parts, RANK=rank, TILE_ROWS=rows_of_tile, BLOCK_RANKS=block_ranks, BLOCK_FEATURES=block_features,
        num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    return inner
