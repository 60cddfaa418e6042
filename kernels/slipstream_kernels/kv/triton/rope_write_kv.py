"""rope_write_kv in Triton-lang: norm, rotation, quantisation and append of a token's heads in one launch.

One program handles some query heads of a token, or some key heads with their value heads.  A head's elements and their
rotation partners are two loads of the same bytes; the second hits the L1 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.kv.triton.kv_formats import FP8, INT8, PLAIN, kv_format
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.rotation import QKRope
from slipstream_kernels.token_slots import TokenSlots
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel

# Elements per program: enough bytes in flight, but several programs per SM. Two warps amortise addresses and angles
# over more elements per thread; four warps have the lower latency for few tokens.
TILE_ELEMENTS = 2048
FEW_TOKENS = 256


@triton.jit
def _partners(dims, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr):
    """The rotation partner of each element; runs of RUN elements stay contiguous, for vectorised loads."""
    if INTERLEAVED:
        partners = dims ^ 1
    else:
        partners = tl.where(dims < ROTARY_DIM // 2, dims + ROTARY_DIM // 2, dims - ROTARY_DIM // 2)
    partners = tl.where(dims < ROTARY_DIM, partners, dims)
    return tl.max_contiguous(tl.multiple_of(partners, RUN), RUN)


@triton.jit
def _angles(row_ptr, dims, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr):
    """cos and the signed sin of each element: y = x * cos + partner * sin.  1 and 0 past the rotary ones."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        pairs, is_first = dims // 2, dims % 2 == 0
    else:
        pairs, is_first = tl.where(dims < HALF, dims, dims - HALF), dims < HALF
        pairs = tl.max_contiguous(tl.multiple_of(pairs, RUN), RUN)
    cos = tl.load(row_ptr + pairs, mask=dims < ROTARY_DIM, other=1.0)
    sin = tl.load(row_ptr + HALF + pairs, mask=dims < ROTARY_DIM, other=0.0)
    return cos, tl.where(is_first, -sin, sin)


@triton.jit
def _turned(x_ptr, norm_ptr, angles_ptr, offsets, dims, is_head, eps,
            HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr,
            HAS_ROPE: tl.constexpr, NORMS_BEFORE: tl.constexpr, NORMS_AFTER: tl.constexpr):  # fmt: skip
    """Heads [HEADS, DIM_PADDED], normalised, rotated and rounded to their own type.  offsets: of each head's start.

    Loads the heads before the angles, because converting the layout of the angles waits for all warps.
    """
    dtype = x_ptr.dtype.element_ty
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    loaded = tl.load(x_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if HAS_ROPE:
        partners = _partners(dims, ROTARY_DIM, INTERLEAVED, RUN)
        loaded_partner = tl.load(x_ptr + offsets[:, None] + partners[None, :], mask=mask, other=0.0)
    x = loaded.to(tl.float32)
    if NORMS_BEFORE:
        rms = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        x = ((x * rms).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    if HAS_ROPE:
        cos, sin = _angles(angles_ptr, dims, ROTARY_DIM, INTERLEAVED, RUN)
        partner = loaded_partner.to(tl.float32)
        if NORMS_BEFORE:
            weight = tl.load(norm_ptr + partners, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
            partner = ((partner * rms).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        x = x * cos[None, :] + partner * sin[None, :]
    if NORMS_AFTER:
        x = x.to(dtype).to(tl.float32)
        rms = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        x = (x * rms).to(dtype).to(tl.float32) * weight
    return x.to(dtype)


@triton.jit
def _append(x, cache_ptr, scale_ptr, rows, heads, is_head,
            HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
            FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr):  # fmt: skip
    """Quantise heads x [HEADS, DIM_PADDED] and store them as rows of the flattened cache, with their scales."""
    dims = tl.arange(0, DIM_PADDED)
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    if FORMAT == PLAIN:
        tl.store(cache_ptr + (rows * HEAD_DIM)[:, None] + dims[None, :], x, mask=mask)
    elif FORMAT == FP8:
        y = x.to(tl.float32)
        if HAS_SCALE:
            y = y / tl.load(scale_ptr + heads, mask=is_head, other=1.0)[:, None]
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        tl.store(cache_ptr + (rows * HEAD_DIM)[:, None] + dims[None, :], to_e4m3(y), mask=mask)
    else:
        y = x.to(tl.float32)
        if FORMAT == INT8:
            scale = tl.max(tl.abs(y), axis=1) / 127.0
        else:
            # The element of largest magnitude is stored as -8: kv/reference/quantized_kv.py.
            highest, lowest = tl.max(y, axis=1), tl.min(y, axis=1)
            scale = tl.where(-lowest > highest, lowest, highest) / -8.0
        tl.store(scale_ptr + rows, scale, mask=is_head)
        # Adding 1.5 * 2^23 rounds to nearest even: the low bits of the sum are the integer.
        y = y * (1.0 / tl.where(tl.abs(scale) < 1e-30, 1e-30, scale))[:, None]
        if FORMAT == INT8:
            codes = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
            tl.store(cache_ptr + (rows * HEAD_DIM)[:, None] + dims[None, :], codes, mask=mask)
        else:
            codes = (tl.minimum(y, 7.0) + 12582920.0).to(tl.int32, bitcast=True) & 15
            low, high = tl.split(tl.reshape(codes, (HEADS, DIM_PADDED // 2, 2)))
            columns = tl.arange(0, DIM_PADDED // 2)
            mask = is_head[:, None] & (columns < HEAD_DIM // 2)[None, :]
            bytes_ = (low | (high << 4)).to(tl.uint8)
            tl.store(cache_ptr + (rows * (HEAD_DIM // 2))[:, None] + columns[None, :], bytes_, mask=mask)


@step_kernel
def _rope_write_kv_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, positions_ptr, slot_mapping_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr,
    key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, eps,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_TILES: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr,
    HAS_ROPE: tl.constexpr, NORMS_BEFORE: tl.constexpr, NORMS_AFTER: tl.constexpr, FORMAT: tl.constexpr,
    HAS_SCALE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of query heads, then tiles of kv heads)."""
    start_dependents(DEPENDENT)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, DIM_PADDED)
    slot = tl.load(slot_mapping_ptr + token)
    angles_ptr = cos_sin_ptr
    if HAS_ROPE:
        angles_ptr += tl.load(positions_ptr + token) * ROTARY_DIM
    await_previous(DEPENDENT)
    if tile < Q_TILES:
        heads = tile * Q_HEADS + tl.arange(0, Q_HEADS)
        is_head = heads < NUM_Q_HEADS
        y = _turned(q_ptr, q_norm_ptr, angles_ptr, token * q_token_stride + heads * q_head_stride, dims, is_head, eps,
                    HEAD_DIM, ROTARY_DIM, INTERLEAVED, RUN, HAS_ROPE, NORMS_BEFORE, NORMS_AFTER)  # fmt: skip
        out_rows = (token * NUM_Q_HEADS + heads) * HEAD_DIM
        mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(q_out_ptr + out_rows[:, None] + dims[None, :], y, mask=mask)
    elif slot >= 0:
        heads = (tile - Q_TILES) * KV_HEADS + tl.arange(0, KV_HEADS)
        is_head = heads < NUM_KV_HEADS
        mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        v_offsets = token * v_token_stride + heads * v_head_stride
        v = tl.load(v_ptr + v_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        k = _turned(k_ptr, k_norm_ptr, angles_ptr, token * k_token_stride + heads * k_head_stride, dims, is_head, eps,
                    HEAD_DIM, ROTARY_DIM, INTERLEAVED, RUN, HAS_ROPE, NORMS_BEFORE, NORMS_AFTER)  # fmt: skip
        rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        _append(k, key_cache_ptr, key_scale_ptr, rows, heads, is_head,
                KV_HEADS, HEAD_DIM, DIM_PADDED, FORMAT, HAS_SCALE)  # fmt: skip
        _append(v, value_cache_ptr, value_scale_ptr, rows, heads, is_head,
                KV_HEADS, HEAD_DIM, DIM_PADDED, FORMAT, HAS_SCALE)  # fmt: skip


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: TokenSlots,
    qk_rope: QKRope,
    cache: KvCache,
) -> torch.Tensor:
    """See ops.rope_write_kv."""
    rope, norms = qk_rope.rope, qk_rope.norms
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, dim_padded = k.shape[1], triton.next_power_of_2(head_dim)
    turns_q = rope is not None or norms is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if turns_q else q
    if num_tokens == 0:
        return out
    q_heads, kv_heads = (
        min(triton.next_power_of_2(count), max(1, TILE_ELEMENTS // dim_padded)) for count in (num_q_heads, num_kv_heads)
    )
    q_tiles = triton.cdiv(num_q_heads, q_heads) if turns_q else 0
    rotary_dim = head_dim if rope is None else rope.rotary_dim
    interleaved = rope is not None and rope.interleaved
    _rope_write_kv_kernel[(num_tokens, q_tiles + triton.cdiv(num_kv_heads, kv_heads))](
        q,
        k,
        v,
        out,
        slots.positions,
        slots.slot_mapping,
        slots.positions if rope is None else rope.cos_sin,
        q if norms is None else norms.q,
        k if norms is None else norms.k,
        cache.key,
        cache.value,
        cache.key if cache.key_scale is None else cache.key_scale,
        cache.value if cache.value_scale is None else cache.value_scale,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        0.0 if norms is None else norms.eps,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=cache.block_size,
        Q_TILES=q_tiles,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        ROTARY_DIM=rotary_dim,
        INTERLEAVED=interleaved,
        RUN=1 if interleaved else min(rotary_dim // 2 & -(rotary_dim // 2), 16),
        HAS_ROPE=rope is not None,
        NORMS_BEFORE=norms is not None and not norms.after_rotation,
        NORMS_AFTER=norms is not None and norms.after_rotation,
        FORMAT=kv_format(cache.dtype),
        HAS_SCALE=cache.key_scale is not None,
        num_warps=4 if num_tokens <= FEW_TOKENS else 2,
        **dependent_launch(q.device),
    )
    return out
