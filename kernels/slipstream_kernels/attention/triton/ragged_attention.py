"""Ragged attention in Triton-lang: FlashAttention-2 tiles over keys that lie side by side; the part of a key that all
heads share is a tile of its own. Key tiles that every row sees take a loop without masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.ragged_call import RaggedCall
from slipstream_kernels.attention.triton.attention_tiles import find_request
from slipstream_kernels.triton.interpreter import dot, padded_width
from slipstream_kernels.triton.step_kernel import step_kernel


@triton.jit
def _load(ptr, rows, is_row, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)[None, :]
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + dims
    if MASKED:
        return tl.load(pointers, mask=is_row[:, None] & (dims < D), other=0.0)
    if D == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=dims < D, other=0.0)


@triton.jit
def _attend(acc, maximum, normaliser, q, q_rope, last_keys, k_ptr, k_rope_ptr, v_ptr, k_stride, k_rope_stride,
            v_stride, first_row, begin, stop, end, scale,
            NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
            BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Online softmax (base 2) over keys [begin, stop), of those before end; last_keys: the last that each row sees."""
    factor = scale * 1.4426950408889634
    for first_key in range(begin, stop, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        rows, is_key = first_row + keys, keys < end
        k = _load(k_ptr, rows, is_key, k_stride, NOPE, BLOCK_D, MASKED)
        k_rope = _load(k_rope_ptr, rows, is_key, k_rope_stride, ROPE, BLOCK_P, MASKED)
        scores = dot(q, tl.trans(k)) + dot(q_rope, tl.trans(k_rope))
        if MASKED:
            scores = tl.where((keys[None, :] <= last_keys[:, None]) & is_key[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
        shift = new_maximum
        if MASKED:
            # A row that has seen no key yet: exp2(-inf - -inf) would be NaN.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probs = tl.exp2(scores * factor - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        normaliser = normaliser * rescale + tl.sum(probs, axis=1)
        v = _load(v_ptr, rows, is_key, v_stride, VALUE, BLOCK_V, MASKED)
        acc = acc * rescale[:, None] + dot(probs.to(v.dtype), v)
        maximum = new_maximum
    return acc, maximum, normaliser


@step_kernel
def _ragged_attention_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, out_ptr, lse_ptr, query_start_loc_ptr, key_start_loc_ptr, key_lens_ptr,
    num_requests, scale, q_token_stride, q_head_stride, k_token_stride, k_head_stride, k_rope_stride, v_token_stride,
    v_head_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, query tiles of all requests), the last tiles, which see most keys, first."""
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    request = find_request(query_start_loc_ptr, num_requests, tile, 1, BLOCK_M)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    first_query = (tile - (start // BLOCK_M + request)) * BLOCK_M
    if first_query >= query_len:
        return
    key_len, first_row = tl.load(key_lens_ptr + request), tl.load(key_start_loc_ptr + request)
    queries = first_query + tl.arange(0, BLOCK_M)
    is_row = queries < query_len
    tokens = (start + queries).to(tl.int64)
    q_ptr += head * q_head_stride
    q = _load(q_ptr, tokens, is_row, q_token_stride, NOPE, BLOCK_D, True)
    q_rope = _load(q_ptr + NOPE, tokens, is_row, q_token_stride, ROPE, BLOCK_P, True)
    last_keys, end, whole = queries * 0 + key_len, key_len, key_len
    if IS_CAUSAL:
        last_keys = key_len - query_len + queries
        end = tl.maximum(tl.minimum(key_len, key_len - query_len + first_query + BLOCK_M), 0)
        whole = tl.minimum(tl.maximum(key_len - query_len + first_query + 1, 0), end)
    middle = whole // BLOCK_N * BLOCK_N  # keys that all rows see, in whole tiles
    k_ptr += head * k_head_stride
    v_ptr += head * v_head_stride
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    acc, maximum, normaliser = _attend(
        acc, maximum, normaliser, q, q_rope, last_keys, k_ptr, k_rope_ptr, v_ptr, k_token_stride, k_rope_stride,
        v_token_stride, first_row, 0, middle, end, scale, NOPE, ROPE, VALUE, BLOCK_D, BLOCK_P, BLOCK_V, BLOCK_N,
        False)  # fmt: skip
    acc, maximum, normaliser = _attend(
        acc, maximum, normaliser, q, q_rope, last_keys, k_ptr, k_rope_ptr, v_ptr, k_token_stride, k_rope_stride,
        v_token_stride, first_row, middle, end, end, scale, NOPE, ROPE, VALUE, BLOCK_D, BLOCK_P, BLOCK_V, BLOCK_N,
        True)  # fmt: skip
    safe = tl.where(normaliser == 0.0, 1.0, normaliser)
    dims = tl.arange(0, BLOCK_V)[None, :]
    places = tokens * HEADS + head
    y = (acc / safe[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[:, None] * VALUE + dims, y, mask=is_row[:, None] & (dims < VALUE))
    lse = tl.where(normaliser == 0.0, float("-inf"), (maximum + tl.log2(safe)) * 0.6931471805599453)
    tl.store(lse_ptr + places, lse, mask=is_row)


def ragged_attention(call: RaggedCall) -> None:
    """See ops.ragged_attention; writes call.out and call.lse."""
    (num_tokens, num_heads, dim), num_requests = call.q.shape, call.metadata.num_requests
    if num_tokens == 0 or num_requests == 0:
        return
    keys, metadata = call.keys, call.metadata
    nope, value_dim = keys.k.shape[2], keys.v.shape[2]
    # Triton 3.6 gives wrong sums on an H200 for tiles whose rows are 32 bytes, so rows have at least 64.
    least = 64 // call.q.element_size()
    block_d, block_p, block_v = (max(padded_width(width), least) for width in (nope, dim - nope, value_dim))
    block_m, block_n, num_warps = 128, 64, 8
    if call.q.dtype == torch.float32 or max(block_d, block_v) > 128:  # what shared memory holds
        block_m, block_n, num_warps = 64, 32, 4
    num_tiles = num_tokens // block_m + num_requests  # each request may end within a tile
    _ragged_attention_kernel[(num_heads, num_tiles)](
        call.q, keys.k, keys.k_rope, keys.v, call.out, call.lse, metadata.query_start_loc, metadata.key_start_loc,
        metadata.key_lens, num_requests, call.scale, call.q.stride(0), call.q.stride(1), keys.k.stride(0),
        keys.k.stride(1), keys.k_rope.stride(0), keys.v.stride(0), keys.v.stride(1),
        HEADS=num_heads, NOPE=nope, ROPE=dim - nope, VALUE=value_dim, BLOCK_D=block_d,
        BLOCK_P=block_p, BLOCK_V=block_v, BLOCK_M=block_m, BLOCK_N=block_n,
        IS_CAUSAL=metadata.is_causal, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
