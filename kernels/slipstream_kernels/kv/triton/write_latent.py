"""write_latent in Triton-lang: norm, rotation, quantisation and append in one launch.

One program handles the latent and the key of a token, or the rotated part of some of its query heads. The two
features of each pair are in two tiles of one layout: a thread loads both before it stores them, so that queries may be
rotated in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.kv.reference.write_latent import SMALLEST_ABSMAX
from slipstream_kernels.latent_cache import LATENT_GROUP, LatentCache, StepLatents
from slipstream_kernels.rotation import Rope
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel

TILE_ELEMENTS = 1024  # features of query heads per program
LEAST = tl.constexpr(SMALLEST_ABSMAX)


@triton.jit
def _rotated(x_ptr, y_ptr, offsets, y_offsets, angles_ptr, is_row, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
             INTERLEAVED: tl.constexpr):  # fmt: skip
    """Rotate rows of 2 * HALF features, from x_ptr + offsets to y_ptr + y_offsets."""
    pairs = tl.arange(0, HALF_PADDED)
    firsts, seconds = pairs, pairs + HALF
    if INTERLEAVED:
        firsts, seconds = 2 * pairs, 2 * pairs + 1
    mask = is_row[:, None] & (pairs < HALF)[None, :]
    first = tl.load(x_ptr + offsets[:, None] + firsts[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offsets[:, None] + seconds[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(angles_ptr + pairs, mask=pairs < HALF, other=1.0)[None, :]
    sin = tl.load(angles_ptr + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    dtype = x_ptr.dtype.element_ty
    low, high = (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
    stored = y_ptr.dtype.element_ty
    tl.store(y_ptr + y_offsets[:, None] + firsts[None, :], low.to(stored), mask=mask)
    tl.store(y_ptr + y_offsets[:, None] + seconds[None, :], high.to(stored), mask=mask)


@triton.jit
def load_norm(norm_ptr, RANK: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """[GROUPS, COLUMNS] fp32"""
    groups, columns = tl.arange(0, GROUPS), tl.arange(0, COLUMNS)
    features = groups[:, None] * GROUP + columns[None, :]
    is_feature = (features < RANK) & (columns < GROUP)[None, :]
    return tl.load(norm_ptr + features, mask=is_feature, other=0.0).to(tl.float32)


@triton.jit
def write_tile(
    q_ptr, q_out_ptr, latent_ptr, weight, values_ptr, scales_ptr, rope_ptr, q_token_stride, q_head_stride,
    out_token_stride, out_head_stride, latent_stride, values_stride, scales_stride, rope_stride, eps, token, tile, slot,
    angles_ptr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, IS_FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The latent and the key of a token (tile 0), or the rotated part of some of its query heads."""
    if tile > 0:
        heads = (tile - 1) * HEADS + tl.arange(0, HEADS)
        _rotated(q_ptr, q_out_ptr, token * q_token_stride + heads * q_head_stride,
                 token * out_token_stride + heads * out_head_stride, angles_ptr, heads < NUM_HEADS, HALF,
                 HALF_PADDED, INTERLEAVED)  # fmt: skip
    elif slot >= 0:
        groups, columns = tl.arange(0, GROUPS), tl.arange(0, COLUMNS)
        features = groups[:, None] * GROUP + columns[None, :]
        is_feature = (features < RANK) & (columns < GROUP)[None, :]
        row_ptr = latent_ptr + token * latent_stride
        dtype = latent_ptr.dtype.element_ty
        x = tl.load(row_ptr + features, mask=is_feature, other=0.0).to(tl.float32)
        rms = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / RANK + eps)
        x = ((x * rms).to(dtype).to(tl.float32) * weight).to(dtype)
        out_ptr = values_ptr + slot * values_stride + features
        if IS_FP8:
            x = x.to(tl.float32)
            scales = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST) / 448.0
            tl.store(scales_ptr + slot * scales_stride + groups, scales, mask=groups * GROUP < RANK)
            x = tl.minimum(tl.maximum(x / scales[:, None], -448.0), 448.0)
            tl.store(out_ptr, to_e4m3(x), mask=is_feature)
        else:
            tl.store(out_ptr, x, mask=is_feature)
        zero = tl.zeros((1,), tl.int64)
        _rotated(row_ptr + RANK, rope_ptr + slot * rope_stride, zero, zero, angles_ptr, zero == 0, HALF, HALF_PADDED,
                 INTERLEAVED)  # fmt: skip


# A step's prompts are views from any token on: no kernel of its own for where they begin.
@step_kernel
def _write_latent_kernel(
    q_ptr, q_out_ptr, latent_ptr, norm_ptr, positions_ptr, slot_mapping_ptr, cos_sin_ptr, values_ptr, scales_ptr,
    rope_ptr, q_token_stride, q_head_stride, out_token_stride, out_head_stride, latent_stride, values_stride,
    scales_stride, rope_stride, eps,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, IS_FP8: tl.constexpr, INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 1 + tiles of query heads)."""
    start_dependents(DEPENDENT)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    weight = load_norm(norm_ptr, RANK, GROUPS, COLUMNS, GROUP)
    await_previous(DEPENDENT)
    write_tile(
        q_ptr, q_out_ptr, latent_ptr, weight, values_ptr, scales_ptr, rope_ptr, q_token_stride, q_head_stride,
        out_token_stride, out_head_stride, latent_stride, values_stride, scales_stride, rope_stride, eps, token, tile,
        slot, angles_ptr, NUM_HEADS, HEADS, RANK, GROUPS, COLUMNS, GROUP, HALF, HALF_PADDED, IS_FP8, INTERLEAVED,
    )  # fmt: skip


def write_latent(q_rope: torch.Tensor, latents: StepLatents, cache: LatentCache, q_out: torch.Tensor) -> None:
    """See ops.write_latent."""
    num_tokens, num_heads, _ = q_rope.shape
    if num_tokens == 0:
        return
    rows, slots, values = latents.rows, latents.slots, cache.values
    scales = cache.scales if cache.is_fp8 else values
    shape = written_shape(num_heads, latents.rope, cache)
    _write_latent_kernel[(num_tokens, 1 + triton.cdiv(num_heads, shape["HEADS"]))](
        q_rope, q_out, rows, latents.norm_weight, slots.positions, slots.slot_mapping, latents.rope.cos_sin, values,
        scales, cache.rope, q_rope.stride(0), q_rope.stride(1), q_out.stride(0), q_out.stride(1), rows.stride(0),
        values.stride(0), scales.stride(0), cache.rope.stride(0), latents.eps, num_warps=2, **shape,
        **dependent_launch(q_rope.device),
    )  # fmt: skip


def written_shape(num_heads: int, rope: Rope, cache: LatentCache) -> dict[str, int | bool]:
    """Constants of write_tile."""
    half_padded = triton.next_power_of_2(rope.rotary_dim // 2)
    group = LATENT_GROUP if cache.is_fp8 else cache.rank
    return {
        "NUM_HEADS": num_heads,
        "HEADS": min(max(TILE_ELEMENTS // (2 * half_padded), 1), triton.next_power_of_2(num_heads)),
        "RANK": cache.rank,
        "GROUPS": triton.next_power_of_2(cache.rank // group),
        "COLUMNS": triton.next_power_of_2(group),
        "GROUP": group,
        "HALF": rope.rotary_dim // 2,
        "HALF_PADDED": half_padded,
        "IS_FP8": cache.is_fp8,
        "INTERLEAVED": rope.interleaved,
    }
