"""rope in Triton-lang: one program rotates all query and key heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(
    x_ptr,
    head_stride,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    pairs = tl.arange(0, HALF_PADDED)[None, :]
    mask = (heads < NUM_HEADS) & (pairs < HALF)
    if INTERLEAVED:
        first_ptr = x_ptr + heads * head_stride + 2 * pairs
        second_ptr = first_ptr + 1
    else:
        first_ptr = x_ptr + heads * head_stride + pairs
        second_ptr = first_ptr + HALF
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(second_ptr, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cache_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    Q_HEADS_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pairs = tl.arange(0, HALF_PADDED)[None, :]
    cos = tl.load(cache_ptr + position * (2 * HALF) + pairs, mask=pairs < HALF, other=0.0)
    sin = tl.load(cache_ptr + position * (2 * HALF) + HALF + pairs, mask=pairs < HALF, other=0.0)
    q_row, k_row = q_ptr + token * q_token_stride, k_ptr + token * k_token_stride
    _rotate(q_row, q_head_stride, cos, sin, NUM_Q_HEADS, Q_HEADS_PADDED, HALF, HALF_PADDED, INTERLEAVED)
    _rotate(k_row, k_head_stride, cos, sin, NUM_KV_HEADS, KV_HEADS_PADDED, HALF, HALF_PADDED, INTERLEAVED)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    rotary_dim: int,
    interleaved: bool,
) -> None:
    """See ops.rope."""
    if q.shape[0] == 0:
        return
    _rope_kernel[(q.shape[0],)](
        q,
        k,
        positions,
        cos_sin_cache,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        NUM_Q_HEADS=q.shape[1],
        NUM_KV_HEADS=k.shape[1],
        Q_HEADS_PADDED=triton.next_power_of_2(q.shape[1]),
        KV_HEADS_PADDED=triton.next_power_of_2(k.shape[1]),
        HALF=rotary_dim // 2,
        HALF_PADDED=triton.next_power_of_2(rotary_dim // 2),
        INTERLEAVED=interleaved,
        num_warps=4,
    )
