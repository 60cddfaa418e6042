"""grouped_int4_mm in Triton-lang, for GPUs and shapes that have no kernel of their own: canonical weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.triton.int4_tile import BLOCK_N, MAX_ROWS, MIN_ROWS, block_k, factor_type, multiply_tile
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.triton.expert_tiles import find_tile
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.routing import Routing
from slipstream_kernels.triton.step_kernel import step_kernel


@step_kernel
def _grouped_int4_mm_kernel(
    x_ptr,
    x_scales_ptr,
    tokens_ptr,
    offsets_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    x_row_stride,
    out_features,
    num_tiles,
    IN_FEATURES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    expert, first, last = find_tile(offsets_ptr, tl.program_id(0) % num_tiles, NUM_EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    features = (tl.program_id(0) // num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature_mask = features < out_features
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < last
    sources = tl.load(tokens_ptr + rows, mask=row_mask, other=0) if BY_TOKEN else rows
    weight_rows = expert.to(tl.int64) * out_features + features
    x_rows = x_ptr + sources.to(tl.int64)[None, :] * x_row_stride
    acc = multiply_tile(
        packed_ptr,
        scales_ptr,
        zeros_ptr,
        weight_rows,
        feature_mask,
        x_rows,
        row_mask,
        IN_FEATURES,
        GROUP_SIZE,
        HAS_ZEROS,
        IS_E2M1,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        FACTOR,
    )
    if HAS_X_SCALES:
        acc *= tl.load(x_scales_ptr + sources, mask=row_mask, other=0.0)[None, :]
    out = out_ptr + rows.to(tl.int64)[None, :] * out_features + features[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=feature_mask[:, None] & row_mask[None, :])


def grouped_int4_mm(
    x: torch.Tensor | Fp8Rows, weight: Int4Weight, routing: Routing, by_token: bool, gated: bool
) -> torch.Tensor:
    """See ops.grouped_int4_mm."""
    rows, num_experts = x.values if isinstance(x, Fp8Rows) else x, routing.num_experts
    out_features = weight.out_features // num_experts
    out = torch.empty((routing.num_rows, out_features), dtype=x.dtype, device=rows.device)
    if not routing.num_rows:
        return silu_mul(out) if gated else out
    average = triton.next_power_of_2(triton.cdiv(routing.sizes[1], num_experts))
    block_m = min(max(average, MIN_ROWS), MAX_ROWS)
    num_tiles = routing.max_tiles(block_m)
    _grouped_int4_mm_kernel[(num_tiles * triton.cdiv(out_features, BLOCK_N),)](
        rows,
        x.scales if isinstance(x, Fp8Rows) else out,
        routing.tokens,
        routing.offsets,
        weight.packed,
        weight.scales,
        out if weight.zeros is None else weight.zeros,
        out,
        rows.stride(0),
        out_features,
        num_tiles,
        IN_FEATURES=weight.in_features,
        GROUP_SIZE=weight.group_size,
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        BY_TOKEN=by_token,
        HAS_X_SCALES=isinstance(x, Fp8Rows),
        HAS_ZEROS=weight.zeros is not None,
        IS_E2M1=weight.is_e2m1,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k(weight),
        FACTOR=factor_type(x, weight),
        num_warps=4,
    )
    return silu_mul(out) if gated else out
