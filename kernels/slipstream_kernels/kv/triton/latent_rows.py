"""Rows of a latent cache in Triton-lang: loading tiles of either format as numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream_kernels.latent_cache import LATENT_GROUP as GROUP_FEATURES
from slipstream_kernels.latent_cache import LatentCache
from slipstream_kernels.triton.interpreter import INTERPRETING, padded_width

LATENT_GROUP = tl.constexpr(GROUP_FEATURES)


@triton.jit
def load_latents(values_ptr, scales_ptr, rows, is_row, values_stride, scales_stride, dtype: tl.constexpr,
                 RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, IS_FP8: tl.constexpr):  # fmt: skip
    """Latents of these slots, [BLOCK_N, BLOCK_R] of dtype; 0 where is_row is false, and past RANK."""
    features = tl.arange(0, BLOCK_R)
    mask = is_row[:, None] & (features < RANK)[None, :]
    stored = tl.load(values_ptr + rows[:, None] * values_stride + features[None, :], mask=mask, other=0.0)
    if IS_FP8:
        GROUPS: tl.constexpr = BLOCK_R // LATENT_GROUP
        groups = tl.arange(0, GROUPS)
        is_scale = is_row[:, None] & (groups * LATENT_GROUP < RANK)[None, :]
        scales = tl.load(scales_ptr + rows[:, None] * scales_stride + groups[None, :], mask=is_scale, other=0.0)
        grouped = tl.reshape(stored.to(tl.float32), (BLOCK_N, GROUPS, LATENT_GROUP))
        stored = tl.reshape(grouped * scales[:, :, None], (BLOCK_N, BLOCK_R))
    return stored.to(dtype)


@triton.jit
def load_rope_keys(rope_ptr, rows, is_row, rope_stride, dtype: tl.constexpr, ROPE: tl.constexpr,
                   BLOCK_P: tl.constexpr):  # fmt: skip
    """The rotated part of these slots, [BLOCK_N, BLOCK_P] of dtype; 0 where is_row is false, and past ROPE."""
    features = tl.arange(0, BLOCK_P)
    mask = is_row[:, None] & (features < ROPE)[None, :]
    stored = tl.load(rope_ptr + rows[:, None] * rope_stride + features[None, :], mask=mask, other=0.0)
    if INTERPRETING:
        stored = stored.to(tl.float32)
    return stored.to(dtype)


def latent_pointers(cache: LatentCache) -> tuple:
    """Values, scales and rope keys, then the strides of their rows; anything where unused."""
    values, rope = cache.values, cache.rope
    scales = cache.scales if cache.is_fp8 else values
    return values, scales, rope, values.stride(0), scales.stride(0), rope.stride(0)


def latent_shape(cache: LatentCache) -> dict[str, int | bool]:
    return {
        "RANK": cache.rank,
        "ROPE": cache.rope_dim,
        "BLOCK_SIZE": cache.block_size,
        "BLOCK_R": padded_width(cache.rank),
        "BLOCK_P": padded_width(cache.rope_dim),
        "IS_FP8": cache.is_fp8,
    }
