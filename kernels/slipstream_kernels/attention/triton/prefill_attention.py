"""Paged attention of long queries in Triton-lang: FlashAttention-2 tiles over the blocks of the cache.

Key tiles that every row of a query tile sees take a loop without masks; only the last ones (all, with a window) are
masked.  The grid follows the number of tokens, not requests times the longest query: a decode row beside a long prompt
costs one program that returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.triton.attention_tiles import (
    caches,
    find_request,
    load_queries,
    options,
    shapes,
    start_softmax,
    store_rows,
    strides,
)
from slipstream_kernels.kv.triton.kv_formats import INT8, VALUE_BOOST, head_scale, load_rows, token_scales, value_factor
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel


@dataclass(frozen=True)
class PrefillTile:
    """Rows and keys of a tile and how to launch it; max_registers lets two programs share an SM and overlap."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# By padded head_dim.  Measured on an H200, causal 8192: docs/measurements, 2026-11-21.
TILES = {
    64: PrefillTile(128, 64, 8, 3, 128),
    128: PrefillTile(128, 64, 8, 3, 128),
    256: PrefillTile(128, 64, 8, 2),
}
FLOAT32_TILE = PrefillTile(64, 32, 4, 2)


@triton.jit
def _scores(q, k, key_scales, positions, keys, slopes, scale, window, soft_cap, end, FORMAT: tl.constexpr,
            HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Scores before the factor that _attend applies with exp2."""
    scores = dot(q, tl.trans(k))
    if FORMAT >= INT8:
        scores *= key_scales[None, :]
    if HAS_SOFT_CAP:
        # tanh(x) = 2 sigmoid(2x) - 1
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scale * scores / soft_cap) - 1.0)
    elif HAS_ALIBI:
        scores = scores * scale
    if HAS_ALIBI:
        scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    if MASKED:
        seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
        if HAS_WINDOW:
            seen = seen & (positions[:, None] - keys[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _attend(acc, maximum, normaliser, q, positions, slopes, key_cache_ptr, value_cache_ptr,
            key_scale_ptr, value_scale_ptr, table_ptr, kv_head, begin, stop, end, scale, window, soft_cap,
            NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
            HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Online softmax (base 2) over keys [begin, stop), multiples of BLOCK_N apart, of those before end.

    A tile of keys lies in one block.  scale includes a head's key scale.
    """
    factor = 1.4426950408889634 if HAS_SOFT_CAP or HAS_ALIBI else scale * 1.4426950408889634
    for first_key in range(begin, stop, BLOCK_N):
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        first_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first_key % BLOCK_SIZE
        k = load_rows(key_cache_ptr, first_row, end - first_key, q.dtype, FORMAT, D, BLOCK_N, BLOCK_D, MASKED)
        key_scales = slopes
        if FORMAT >= INT8:
            key_scales = token_scales(key_scale_ptr, first_row, end - first_key, BLOCK_N)
        scores = _scores(q, k, key_scales, positions, first_key + tl.arange(0, BLOCK_N), slopes, scale, window,
                         soft_cap, end, FORMAT, HAS_WINDOW, HAS_ALIBI, HAS_SOFT_CAP, MASKED)  # fmt: skip
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
        shift = new_maximum
        if MASKED:
            # A row that has seen no key yet: exp2(-inf - -inf) would be NaN.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probs = tl.exp2(scores * factor - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        normaliser = normaliser * rescale + tl.sum(probs, axis=1)
        if FORMAT >= INT8:
            probs *= token_scales(value_scale_ptr, first_row, end - first_key, BLOCK_N)[None, :] * VALUE_BOOST
        v = load_rows(value_cache_ptr, first_row, end - first_key, q.dtype, FORMAT, D, BLOCK_N, BLOCK_D, MASKED)
        acc = acc * rescale[:, None] + dot(probs.to(v.dtype), v)
        maximum = new_maximum
    return acc, maximum, normaliser


@step_kernel
def _prefill_kernel(q_ptr, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, out_ptr,
                    tables_ptr, query_start_loc_ptr, seq_lens_ptr, num_requests, slopes_ptr, sinks_ptr,
                    scale, window, soft_cap, token_stride, head_stride, table_stride,
                    MIN_QUERY_LEN: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                    FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr,
                    HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
                    HAS_SINKS: tl.constexpr):  # fmt: skip
    """Grid (kv heads, query tiles of all requests), the last tiles, which see most keys, first."""
    kv_head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    request = find_request(query_start_loc_ptr, num_requests, tile, GROUP, BLOCK_M)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    first_row = (tile - (start * GROUP // BLOCK_M + request)) * BLOCK_M
    if query_len < MIN_QUERY_LEN:
        return
    if first_row >= query_len * GROUP:
        return
    start = start.to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - query_len
    rows = first_row + tl.arange(0, BLOCK_M)
    positions = first_position + rows // GROUP
    q = load_queries(q_ptr, start, query_len, kv_head, first_row, token_stride, head_stride,
                     GROUP, D, BLOCK_M, BLOCK_D)  # fmt: skip
    slopes = rows.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + kv_head * GROUP + rows % GROUP)
    end = tl.maximum(tl.minimum(seq_len, first_position + (first_row + BLOCK_M - 1) // GROUP + 1), 0)
    scale = scale * head_scale(key_scale_ptr, kv_head, FORMAT, HAS_SCALE)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    maximum, normaliser = start_softmax(sinks_ptr, kv_head * GROUP + rows % GROUP, BLOCK_M, HAS_SINKS)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    if HAS_WINDOW:
        middle = tl.maximum(first_position + first_row // GROUP - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        # Keys that the tile's first query sees are seen by all its rows.
        middle = tl.minimum(tl.maximum(first_position + first_row // GROUP + 1, 0), end) // BLOCK_N * BLOCK_N
        acc, maximum, normaliser = _attend(
            acc, maximum, normaliser, q, positions, slopes, key_cache_ptr, value_cache_ptr,
            key_scale_ptr, value_scale_ptr, table_ptr, kv_head,
            0, middle, end, scale, window, soft_cap, NUM_KV_HEADS, BLOCK_SIZE, D, BLOCK_N, BLOCK_D, FORMAT,
            HAS_WINDOW, HAS_ALIBI, HAS_SOFT_CAP, False)  # fmt: skip
    acc, maximum, normaliser = _attend(
        acc, maximum, normaliser, q, positions, slopes, key_cache_ptr, value_cache_ptr,
        key_scale_ptr, value_scale_ptr, table_ptr, kv_head,
        middle, end, end, scale, window, soft_cap, NUM_KV_HEADS, BLOCK_SIZE, D, BLOCK_N, BLOCK_D, FORMAT,
        HAS_WINDOW, HAS_ALIBI, HAS_SOFT_CAP, True)  # fmt: skip
    factor = value_factor(value_scale_ptr, kv_head, FORMAT, HAS_SCALE)
    store_rows(out_ptr, acc, factor, normaliser, start, query_len, kv_head, first_row,
               GROUP, NUM_KV_HEADS, D, BLOCK_M, BLOCK_D)  # fmt: skip


def attend_long(call: AttentionCall, min_query_len: int) -> None:
    """Write call.out's rows of requests with at least min_query_len queries.  One launch."""
    (num_tokens, num_q_heads, head_dim), num_requests = call.q.shape, call.metadata.num_requests
    num_kv_heads = call.cache.num_kv_heads
    tile = FLOAT32_TILE if call.q.dtype == torch.float32 else TILES[triton.next_power_of_2(head_dim)]
    # Each request may end within a tile.
    num_tiles = num_tokens * (num_q_heads // num_kv_heads) // tile.block_m + num_requests
    _prefill_kernel[(num_kv_heads, num_tiles)](
        call.q,
        *caches(call),
        call.out,
        call.metadata.block_tables,
        call.metadata.query_start_loc,
        call.metadata.seq_lens,
        num_requests,
        *options(call),
        *strides(call),
        MIN_QUERY_LEN=min_query_len,
        **shapes(call, tile.block_m, tile.block_n),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
    )
