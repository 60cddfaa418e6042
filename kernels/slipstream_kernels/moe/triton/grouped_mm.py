"""grouped_mm in Triton-lang: a stream over the weights of experts that have rows, their rows the tall side of a tile.

FP8 sums leave the tensor core for fp32 registers every 128 columns, with the scales of the block applied if there are
such; those of int8 rows are exact.  Gated, a program has a tile of gate and one of up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.moe.triton.expert_tiles import find_tile
from slipstream_kernels.norm.triton.gated_mul import silu
from slipstream_kernels.routing import Routing
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel


@dataclass(frozen=True)
class Tile:
    """block_n: output features of a program; block_k: input features at a time, of which num_stages are in flight.

    group_tiles: so many tiles of rows take all output features before the next ones do, 0: all tiles.  Programs that
    run at once then read rows and weights that the L2 cache holds together.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_tiles: int = 0


# by the rows that a tile should hold, and bytes of an element of the products
TILES = {
    (16, 1): Tile(16, 64, 128, 4, 5),
    (32, 1): Tile(32, 64, 128, 4, 5),
    (64, 1): Tile(64, 64, 128, 4, 4),
    (128, 1): Tile(128, 128, 128, 8, 3),
    (16, 2): Tile(16, 64, 64, 4, 5),
    (32, 2): Tile(32, 64, 64, 4, 5),
    (64, 2): Tile(64, 64, 64, 4, 4),
    (128, 2): Tile(128, 128, 64, 8, 3),
    (16, 4): Tile(16, 32, 32, 4, 2),
    (32, 4): Tile(32, 32, 32, 4, 2),
    (64, 4): Tile(64, 32, 32, 4, 2),
    (128, 4): Tile(64, 32, 32, 4, 2),
}
# of many rows: sums of a block stand beside those of gate and up, and wider tiles do not fit into registers
BLOCKWISE_TILE = Tile(128, 64, 128, 8, 4)


@triton.jit
def _widen(weight, TO: tl.constexpr):
    """As the plain rows beside it."""
    if weight.dtype == tl.int8:
        weight = weight.to(tl.float32)  # the interpreter cannot make bf16 of integers
    return weight.to(TO)


@triton.jit
def place_of(program, num_tiles, num_blocks, GROUP_TILES: tl.constexpr):
    """(tile of rows, block of output features).  Tiles of rows are neighbours: those of one expert read the same
    weights at the same time."""
    first = 0
    group = num_tiles
    if GROUP_TILES > 0:
        first = program // (GROUP_TILES * num_blocks) * GROUP_TILES
        group = tl.minimum(GROUP_TILES, num_tiles - first)
    place = program - first * num_blocks
    return first + place % group, place // group


@step_kernel
def _grouped_mm_kernel(
    x_ptr,
    x_scales_ptr,
    tokens_ptr,
    offsets_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    x_row_stride,
    x_scales_stride,
    scales_row_stride,
    out_features,
    num_tiles,
    IN_FEATURES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_BLOCKWISE: tl.constexpr,
    IS_INT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    width = out_features // 2 if GATED else out_features
    tile, block = place_of(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP_TILES)
    expert, first, last = find_tile(offsets_ptr, tile, NUM_EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    features_begin = block * BLOCK_N
    features = features_begin + tl.arange(0, BLOCK_N)
    feature_mask = features < width
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < last
    sources = tl.load(tokens_ptr + rows, mask=row_mask, other=0) if BY_TOKEN else rows
    columns = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + (expert.to(tl.int64) * out_features + features)[:, None] * IN_FEATURES + columns[None, :]
    to_up = width.to(tl.int64) * IN_FEATURES
    x_rows = x_ptr + sources.to(tl.int64)[None, :] * x_row_stride + columns[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT8 else tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT8 else tl.float32)
    if IS_BLOCKWISE:  # fetched one block ahead, as gemm/triton/scaled_mm.py
        block_row = expert.to(tl.int64) * tl.cdiv(out_features, BLOCK_K) + features_begin // BLOCK_K
        block_scales = scales_ptr + block_row * scales_row_stride
        to_up_scales = width // BLOCK_K * scales_row_stride
        x_scale = tl.load(x_scales_ptr + sources, mask=row_mask, other=0.0)
        scale = tl.load(block_scales)
        up_scale = scale
        if GATED:
            up_scale = tl.load(block_scales + to_up_scales)
    for start in tl.range(0, IN_FEATURES, BLOCK_K, num_stages=NUM_STAGES):
        w_mask = feature_mask[:, None]
        x_mask = row_mask[None, :]
        if IN_FEATURES % BLOCK_K != 0:
            inside = start + columns < IN_FEATURES
            w_mask = w_mask & inside[None, :]
            x_mask = x_mask & inside[:, None]
        w = tl.load(weight_rows + start, mask=w_mask, other=0.0)
        x = tl.load(x_rows + start, mask=x_mask, other=0.0)
        if HAS_SCALES and not HAS_X_SCALES:
            w = _widen(w, x.dtype)
        if IS_BLOCKWISE:
            following = tl.minimum(start // BLOCK_K + 1, IN_FEATURES // BLOCK_K - 1)
            next_x_scale = tl.load(x_scales_ptr + sources + following * x_scales_stride, mask=row_mask, other=0.0)
            next_scale = tl.load(block_scales + following)
            acc += dot(w, x) * (x_scale * scale)[None, :]
            scale = next_scale
        else:
            acc += dot(w, x).to(acc.dtype)
        if GATED:
            up = tl.load(weight_rows + to_up + start, mask=w_mask, other=0.0)
            if HAS_SCALES and not HAS_X_SCALES:
                up = _widen(up, x.dtype)
            if IS_BLOCKWISE:
                next_up_scale = tl.load(block_scales + to_up_scales + following)
                up_acc += dot(up, x) * (x_scale * up_scale)[None, :]
                up_scale = next_up_scale
            else:
                up_acc += dot(up, x).to(up_acc.dtype)
        if IS_BLOCKWISE:
            x_scale = next_x_scale
    acc = acc.to(tl.float32)
    up_acc = up_acc.to(tl.float32)
    if HAS_SCALES and not IS_BLOCKWISE:
        scales = scales_ptr + expert * out_features + features
        acc *= tl.load(scales, mask=feature_mask, other=0.0)[:, None]
        if GATED:
            up_acc *= tl.load(scales + width, mask=feature_mask, other=0.0)[:, None]
    if HAS_X_SCALES and not IS_BLOCKWISE:
        x_scale = tl.load(x_scales_ptr + sources, mask=row_mask, other=0.0)[None, :]
        acc *= x_scale
        up_acc *= x_scale
    if GATED:
        acc = silu(acc) * up_acc
    out = out_ptr + rows.to(tl.int64)[None, :] * width + features[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=feature_mask[:, None] & row_mask[None, :])


def grouped_mm(
    x: torch.Tensor | Fp8Rows | Int8Rows,
    weight: torch.Tensor,
    routing: Routing,
    scales: torch.Tensor | None,
    by_token: bool,
    gated: bool,
) -> torch.Tensor:
    """See ops.grouped_mm."""
    num_experts, out_features, in_features = weight.shape
    width = out_features // 2 if gated else out_features
    out = torch.empty((routing.num_rows, width), dtype=x.dtype, device=weight.device)
    if not routing.num_rows:
        return out
    rows, x_scales = (x, None) if isinstance(x, torch.Tensor) else (x.values, x.scales)
    is_blockwise = scales is not None and scales.dim() == 3
    tile = tile_of(routing, rows, is_blockwise)
    num_tiles = routing.max_tiles(tile.block_m)
    _grouped_mm_kernel[(num_tiles * triton.cdiv(width, tile.block_n),)](
        rows,
        out if x_scales is None else x_scales,
        routing.tokens,
        routing.offsets,
        weight,
        out if scales is None else scales,
        out,
        rows.stride(0),
        0 if x_scales is None else x_scales.stride(-1),
        0 if scales is None or not is_blockwise else scales.stride(1),
        out_features,
        num_tiles,
        IN_FEATURES=in_features,
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        BY_TOKEN=by_token,
        GATED=gated,
        HAS_X_SCALES=x_scales is not None,
        HAS_SCALES=scales is not None,
        IS_BLOCKWISE=is_blockwise,
        IS_INT8=rows.dtype == torch.int8,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        NUM_STAGES=tile.num_stages,
        GROUP_TILES=tile.group_tiles,
        num_warps=tile.num_warps,
        **dependent_launch(weight.device),
    )
    return out


def tile_of(routing: Routing, rows: torch.Tensor, is_blockwise: bool) -> Tile:
    """The tile for an average expert's rows, whose type is that of the products.

    Tokens choose by chance, so many experts have more rows than the average one: a tile of up to 64 rows has room for
    half as many again, or those experts' weights are read twice (5 to 10 % of a product of 12 to 32 rows an expert).
    """
    _, num_rows, num_experts = routing.sizes
    average = triton.next_power_of_2(triton.cdiv(num_rows, num_experts))
    if is_blockwise and average > 64:
        return BLOCKWISE_TILE
    roomy = triton.next_power_of_2(triton.cdiv(num_rows * 3, num_experts * 2))
    return TILES[min(max(average, min(roomy, 64), 16), 128), rows.element_size()]
