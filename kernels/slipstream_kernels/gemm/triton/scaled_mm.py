"""scaled_mm in Triton-lang for few rows: a stream over the weights, their rows being the tall side of the tile.

Sums leave the tensor core for fp32 registers every 128 columns, exactly or with the scales of the block applied.
int8 rows and weights (int8_mm) take the same way, with exact sums in int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import BLOCK, Fp8Rows
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel

MIN_STEPS = 4  # blocks of 128 columns below which a program is not worth its start
MAX_SPLITS = 8


@dataclass(frozen=True)
class Tile:
    """block_n: output features of a program; num_stages: blocks of 128 columns in flight; num_programs: how many the
    splitting of sums aims at, an H200 having 132 multiprocessors."""

    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int


# (is block-wise, rows of the tile) -> Tile, the least time of Llama-3-8B's four products on an H200 (docs/measurements)
TILES = {
    (False, 16): Tile(64, 4, 5, 264),
    (False, 32): Tile(64, 4, 4, 264),
    (False, 64): Tile(64, 4, 6, 264),
    (True, 16): Tile(64, 4, 5, 264),
    (True, 32): Tile(64, 4, 4, 264),
    (True, 64): Tile(128, 8, 4, 132),
}
MIN_ROWS, MAX_ROWS = 16, 64


@step_kernel
def _scaled_mm_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_tokens,
    num_rows,
    out_features,
    scales_row_stride,
    IN_FEATURES: tl.constexpr,
    IS_BLOCKWISE: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    # Splits of one tile are neighbours, so that they end about together; tiles of rows come last.
    split = tl.program_id(0) % NUM_SPLITS
    tile = tl.program_id(0) // NUM_SPLITS
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature_mask, token_mask = features < out_features, tokens < num_tokens
    columns = tl.arange(0, BLOCK_K)
    num_blocks: tl.constexpr = (IN_FEATURES + BLOCK_K - 1) // BLOCK_K
    first, last = split * num_blocks // NUM_SPLITS, (split + 1) * num_blocks // NUM_SPLITS

    weight_rows = weight_ptr + features.to(tl.int64)[:, None] * IN_FEATURES + columns[None, :]
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * IN_FEATURES + columns[:, None]
    x_scales = x_scales_ptr + tokens
    scales = scales_ptr + (tile * BLOCK_N // BLOCK_K) * scales_row_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT8 else tl.float32)
    await_previous(DEPENDENT)
    if IS_BLOCKWISE:  # fetched one block ahead: their latency would be the loop's
        x_scale = tl.load(x_scales + first * num_rows, mask=token_mask, other=0.0)
        weight_scale = tl.load(scales + first)
    for block in tl.range(first, last, num_stages=NUM_STAGES):
        start = block * BLOCK_K
        if IN_FEATURES % BLOCK_K == 0:
            w = tl.load(weight_rows + start, mask=feature_mask[:, None], other=0.0)
            x = tl.load(x_rows + start, mask=token_mask[None, :], other=0.0)
        else:
            inside = start + columns < IN_FEATURES
            w = tl.load(weight_rows + start, mask=feature_mask[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_rows + start, mask=token_mask[None, :] & inside[:, None], other=0.0)
        if IS_BLOCKWISE:
            following = tl.minimum(block + 1, last - 1)
            next_x_scale = tl.load(x_scales + following * num_rows, mask=token_mask, other=0.0)
            next_weight_scale = tl.load(scales + following)
            acc += dot(w, x) * (x_scale * weight_scale)[None, :]
            x_scale, weight_scale = next_x_scale, next_weight_scale
        elif IS_INT8:
            acc += dot(w, x).to(tl.int32)
        else:
            acc += dot(w, x)

    offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    is_last = True
    if NUM_SPLITS > 1:
        # The last of a tile's splits adds all partial sums in order, so the result does not depend on who was last.
        unit = tl.program_id(1) * tl.cdiv(out_features, BLOCK_N) + tile
        parts = partial_ptr + (unit.to(tl.int64) * NUM_SPLITS) * (BLOCK_N * BLOCK_M) + offsets
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters_ptr + unit, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        if NUM_SPLITS > 1:
            tl.store(counters_ptr + unit, 0)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT8 else tl.float32)
            for part in tl.static_range(NUM_SPLITS):
                acc += tl.load(parts + part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        y = acc.to(tl.float32)
        if not IS_BLOCKWISE:
            x_scale = tl.load(x_scales, mask=token_mask, other=0.0)
            y *= tl.load(scales_ptr + features, mask=feature_mask, other=0.0)[:, None] * x_scale[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + features, mask=feature_mask, other=0.0).to(tl.float32)[:, None]
        out = out_ptr + tokens.to(tl.int64)[None, :] * out_features + features[:, None]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=feature_mask[:, None] & token_mask[None, :])


def num_splits(out_features: int, in_features: int, tile: Tile) -> int:
    """Programs that share a tile of output features."""
    tiles, steps = -(-out_features // tile.block_n), -(-in_features // BLOCK)
    return max(1, min(tile.num_programs // tiles, steps // MIN_STEPS, MAX_SPLITS))


def scaled_mm(
    rows: Fp8Rows | Int8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.scaled_mm; of int8 rows and weights ops.int8_mm."""
    num_tokens, (out_features, in_features) = rows.num_tokens, weight.shape
    out = torch.empty((num_tokens, out_features), dtype=rows.dtype, device=weight.device)
    if not num_tokens:
        return out
    block_m = min(max(triton.next_power_of_2(num_tokens), MIN_ROWS), MAX_ROWS)
    tile = TILES[scales.dim() == 2, block_m]
    splits = num_splits(out_features, in_features, tile)
    grid = (-(-out_features // tile.block_n) * splits, -(-num_tokens // block_m))
    partial = out
    if splits > 1:
        dtype = torch.int32 if weight.dtype == torch.int8 else torch.float32
        partial = torch.empty(grid[0] * grid[1] * tile.block_n * block_m, dtype=dtype, device=weight.device)
        if counters is None or grid[1] > 1:
            counters = torch.zeros(grid[0] * grid[1] // splits, dtype=torch.int32, device=weight.device)
    # Itself launched plainly: come up early, its programs crowd where the kernel before leaves room, and a Llama-3-8B
    # step of one request takes 3.23 ms instead of 3.08.  What follows it may come up early.
    launch = dependent_launch(weight.device)
    launch.pop("launch_pdl", None)
    _scaled_mm_kernel[grid](
        rows.values,
        rows.scales,
        weight,
        scales,
        out if bias is None else bias,
        out,
        partial,
        out if counters is None else counters,
        num_tokens,
        rows.values.shape[0],
        out_features,
        scales.stride(0),
        IN_FEATURES=in_features,
        IS_BLOCKWISE=scales.dim() == 2,
        IS_INT8=weight.dtype == torch.int8,
        HAS_BIAS=bias is not None,
        NUM_SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch,
    )
    return out
