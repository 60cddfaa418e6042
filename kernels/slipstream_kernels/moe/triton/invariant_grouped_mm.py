"""invariant_grouped_mm in Triton-lang: invariant_mm's sums and tiles, a tile of rows of one expert at a time.

One program computes all parts of its sums: experts have output features enough to fill a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.gemm.triton.invariant_mm import EXACT, SPAN, choose_tile, finished, sum_parts
from slipstream_kernels.moe.triton.expert_tiles import find_tile
from slipstream_kernels.moe.triton.grouped_mm import place_of
from slipstream_kernels.routing import Routing
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _invariant_grouped_mm_kernel(
    x_ptr,
    tokens_ptr,
    offsets_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    x_row_stride,
    out_features,
    num_tiles,
    IN_FEATURES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of rows x tiles of features): a tile is [BLOCK_N features, BLOCK_M rows of one expert]."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    tile, block = place_of(tl.program_id(0), num_tiles, tl.cdiv(out_features, BLOCK_N), 0)
    expert, first, last = find_tile(offsets_ptr, tile, NUM_EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    rows, features = first + tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, feature_mask = rows < last, features < out_features
    sources = tl.load(tokens_ptr + rows, mask=row_mask, other=0) if BY_TOKEN else rows
    columns = tl.arange(0, BLOCK_K)
    own_rows = (expert.to(tl.int64) * out_features + features)[:, None]
    weight_rows = weight_ptr + own_rows * IN_FEATURES + columns[None, :]
    x_rows = x_ptr + sources.to(tl.int64)[None, :] * x_row_stride + columns[:, None]
    total = sum_parts(
        weight_rows, x_rows, 1, feature_mask, row_mask, 0, IN_FEATURES, IN_FEATURES, HAS_SCALES, SPAN, BLOCK_M,
        BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    y = finished(total, own_rows, feature_mask[:, None], scales_ptr, scales_ptr, HAS_SCALES, False)
    out = out_ptr + rows.to(tl.int64)[None, :] * out_features + features[:, None]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=feature_mask[:, None] & row_mask[None, :])


def invariant_grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, scales: torch.Tensor | None, by_token: bool
) -> torch.Tensor:
    """See ops.invariant_grouped_mm."""
    num_experts, out_features, in_features = weight.shape
    out = torch.empty((routing.num_rows, out_features), dtype=x.dtype, device=x.device)
    if not routing.num_rows:
        return out
    tile = choose_tile(_rows_of_a_tile(routing), x.dtype)
    num_tiles = routing.max_tiles(tile.block_m)
    launch = dependent_launch(x.device)
    launch.pop("launch_pdl", None)  # itself plainly, as gemm/triton/scaled_mm.py
    _invariant_grouped_mm_kernel[(num_tiles * triton.cdiv(out_features, tile.block_n),)](
        x, routing.tokens, routing.offsets, weight, out if scales is None else scales, out, x.stride(0), out_features,
        num_tiles, IN_FEATURES=in_features, NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts), BY_TOKEN=by_token, HAS_SCALES=scales is not None,
        SPAN=SPAN, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, **EXACT, **launch,
    )  # fmt: skip
    return out


def _rows_of_a_tile(routing: Routing) -> int:
    """Half as many again as the average expert has: tokens choose by chance, and a second tile reads weights again."""
    _, num_rows, num_experts = routing.sizes
    return triton.cdiv(num_rows * 3, num_experts * 2)
