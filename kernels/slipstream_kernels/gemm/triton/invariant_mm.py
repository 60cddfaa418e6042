"""invariant_mm in Triton-lang: every sum is cut after the same SPAN input features, and the parts are added in order.

What differs with the number of rows is who adds: for few rows a program computes one part, so that the whole GPU reads
the weight, and a second kernel adds; for many rows one program does it all.  The tensor core's sum of an element
depends neither on the tile around it nor on its place there, so tiles may differ as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot_onto
from slipstream_kernels.triton.step_kernel import step_kernel

SPAN = 1024  # input features of a part
MAX_PARTIAL_BYTES = 64 << 20
TILES_PER_BAND = 8  # tiles of tokens that share a tile of the weight while it is in L2
SUM_BLOCK = 512
# Two kernels that do the same sums must round alike: no product is fused with a sum.
EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Tile:
    """Tokens, output features and input features of a tile, and how to launch it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Up to so many tokens -> Tile.  At least 64 features to four warps: smaller products are another instruction's.
TILES = {16: Tile(16, 64, 128, 4, 5), 64: Tile(64, 64, 64, 4, 5)}
LARGE_TILE = Tile(128, 128, 64, 8, 4)
FLOAT32_TILE = Tile(32, 32, 32, 4, 2)


@triton.jit
def finished(total, features, feature_mask, scales_ptr, bias_ptr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sums of features -> results, before they are rounded.  features broadcast against total."""
    if HAS_SCALES:
        total *= tl.load(scales_ptr + features, mask=feature_mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + features, mask=feature_mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_parts(
    weight_rows,
    x_rows,
    weight_stride,
    feature_mask,
    token_mask,
    first,
    last,
    IN_FEATURES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """[BLOCK_N features, BLOCK_M tokens] fp32: the sums over input features first to last, part after part.

    weight_rows [BLOCK_N, BLOCK_K], x_rows [BLOCK_K, BLOCK_M]: where the first input features are; of a weight row
    the next one is weight_stride further.  first: a multiple of SPAN.
    """
    columns = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for part in range(first, last, SPAN):
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in tl.range(part, tl.minimum(part + SPAN, IN_FEATURES), BLOCK_K, num_stages=NUM_STAGES):
            if IN_FEATURES % BLOCK_K == 0:
                w = tl.load(weight_rows + start * weight_stride, mask=feature_mask[:, None], other=0.0)
                x = tl.load(x_rows + start, mask=token_mask[None, :], other=0.0)
            else:
                inside = start + columns < IN_FEATURES
                w_mask = feature_mask[:, None] & inside[None, :]
                w = tl.load(weight_rows + start * weight_stride, mask=w_mask, other=0.0)
                x = tl.load(x_rows + start, mask=token_mask[None, :] & inside[:, None], other=0.0)
            if HAS_SCALES:
                w = w.to(tl.float32).to(x.dtype)
            acc = dot_onto(acc, w, x)
        total += acc
    return total


@step_kernel
def _invariant_mm_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    x_row_stride,
    num_tokens,
    out_features,
    IN_FEATURES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles, parts if IS_SPLIT): a tile is [BLOCK_N features, BLOCK_M tokens]."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    num_token_tiles, num_feature_tiles = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    band = tl.program_id(0) // (BAND * num_feature_tiles)
    height = tl.minimum(num_token_tiles - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * num_feature_tiles)
    tokens = (band * BAND + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = (place // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature_mask, token_mask = features < out_features, tokens < num_tokens
    columns = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + features.to(tl.int64)[:, None] * IN_FEATURES + columns[None, :]
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_row_stride + columns[:, None]
    first, last = tl.program_id(1) * SPAN, IN_FEATURES
    if IS_SPLIT:
        last = tl.minimum(first + SPAN, IN_FEATURES)
    total = sum_parts(
        weight_rows, x_rows, 1, feature_mask, token_mask, first, last, IN_FEATURES, HAS_SCALES, SPAN, BLOCK_M, BLOCK_N,
        BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    places = tokens.to(tl.int64)[None, :] * out_features + features[:, None]
    mask = feature_mask[:, None] & token_mask[None, :]
    if IS_SPLIT:
        tl.store(partial_ptr + tl.program_id(1) * num_tokens.to(tl.int64) * out_features + places, total, mask=mask)
    else:
        y = finished(total, features[:, None], feature_mask[:, None], scales_ptr, bias_ptr, HAS_SCALES, HAS_BIAS)
        tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)


@step_kernel
def _add_parts_kernel(
    partial_ptr, scales_ptr, bias_ptr, out_ptr, num_tokens, out_features,
    NUM_PARTS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of features, tokens)."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    features = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = features < out_features
    places = tl.program_id(1).to(tl.int64) * out_features + features
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(partial_ptr + part * num_tokens.to(tl.int64) * out_features + places, mask=mask, other=0.0)
    y = finished(total, features, mask, scales_ptr, bias_ptr, HAS_SCALES, HAS_BIAS)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)


def choose_tile(num_tokens: int, dtype: torch.dtype) -> Tile:
    """The tile for so many tokens; any tile gives the same bits."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next((tile for most, tile in TILES.items() if num_tokens <= most), LARGE_TILE)


def is_split(num_tokens: int, out_features: int, in_features: int, tile: Tile, num_programs: int) -> bool:
    """Whether the parts of a sum are programs of their own: when tiles alone leave the GPU's bandwidth unused."""
    num_parts = -(-in_features // SPAN)
    num_tiles = -(-num_tokens // tile.block_m) * -(-out_features // tile.block_n)
    is_small = 4 * num_parts * num_tokens * out_features <= MAX_PARTIAL_BYTES
    wanted = num_programs if tile is LARGE_TILE else 2 * num_programs
    return num_parts > 1 and num_tiles < wanted and is_small


def invariant_mm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """See ops.invariant_mm."""
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    tile = choose_tile(num_tokens, x.dtype)
    splits = is_split(num_tokens, out_features, in_features, tile, count_sms(x.device))
    num_parts = triton.cdiv(in_features, SPAN) if splits else 1
    partial = out
    if splits:
        partial = torch.empty((num_parts, num_tokens, out_features), dtype=torch.float32, device=x.device)
    flags = {"HAS_SCALES": scales is not None, "HAS_BIAS": bias is not None, **EXACT, **dependent_launch(x.device)}
    factors = (out if scales is None else scales, out if bias is None else bias)
    grid = (triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(out_features, tile.block_n), num_parts)
    _invariant_mm_kernel[grid](
        x, weight, *factors, out, partial, x.stride(0), num_tokens, out_features,
        IN_FEATURES=in_features, IS_SPLIT=splits, SPAN=SPAN, BAND=TILES_PER_BAND,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, **flags,
    )  # fmt: skip
    if splits:
        _add_parts_kernel[(triton.cdiv(out_features, SUM_BLOCK), num_tokens)](
            partial, *factors, out, num_tokens, out_features, NUM_PARTS=num_parts, BLOCK=SUM_BLOCK, num_warps=4, **flags
        )
    return out
