"""Paged attention in Triton-lang: a split-KV kernel with a merge for short queries; prefill_attention.py has the long.

Grids depend on host integers only (no device read, CUDA-graph safe); a program that finds nothing to do returns.
Query heads of one kv head are rows of one tile (GQA packing), so K and V are read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.triton.attention_tiles import (
    caches,
    load_queries,
    options,
    shapes,
    start_softmax,
    store_rows,
    strides,
)
from slipstream_kernels.attention.triton.prefill_attention import attend_long
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.kv.triton.kv_formats import (
    INT8,
    VALUE_BOOST,
    head_scale,
    load_rows,
    token_scales,
    value_factor,
)
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel

# Queries up to this length go to the split-KV kernel: decode rows, and the draft rows of speculation.
SHORT_QUERY_LEN = 16
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 128
PROGRAMS_PER_SM = 4


@triton.jit
def _attend_span(maximum, normaliser, q, positions, slopes, key_cache_ptr, value_cache_ptr, key_scale_ptr,
                 value_scale_ptr, table_ptr, kv_head, begin, end, scale, window, soft_cap,
                 NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
                 HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFT_CAP: tl.constexpr):  # fmt: skip
    """Online softmax of q's rows over keys [begin, end); begin is a multiple of BLOCK_N, which divides BLOCK_SIZE.

    maximum, normaliser: before the first key.  scale includes a head's key scale.  Returns the unnormalised sum of
    values (before value_factor), the running maximum (base 2) and the normaliser.
    """
    columns = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first_key in range(begin, end, BLOCK_N):
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        first_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first_key % BLOCK_SIZE
        keys = first_key + columns
        k = load_rows(key_cache_ptr, first_row, end - first_key, q.dtype, FORMAT, D, BLOCK_N, BLOCK_D, True)
        scores = dot(q, tl.trans(k)) * scale
        if FORMAT >= INT8:
            scores *= token_scales(key_scale_ptr, first_row, end - first_key, BLOCK_N)[None, :]
        if HAS_SOFT_CAP:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        if HAS_ALIBI:
            scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
        if HAS_WINDOW:
            seen = seen & (positions[:, None] - keys[None, :] < window)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen no key yet: exp2(-inf - -inf) would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probs = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        normaliser = normaliser * rescale + tl.sum(probs, axis=1)
        if FORMAT >= INT8:
            probs *= token_scales(value_scale_ptr, first_row, end - first_key, BLOCK_N)[None, :] * VALUE_BOOST
        v = load_rows(value_cache_ptr, first_row, end - first_key, q.dtype, FORMAT, D, BLOCK_N, BLOCK_D, True)
        acc = acc * rescale[:, None] + dot(probs.to(v.dtype), v)
        maximum = new_maximum
    return acc, maximum, normaliser


@step_kernel
def _short_kernel(q_ptr, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, out_ptr,
                  partial_ptr, lse_ptr, tables_ptr, query_start_loc_ptr, seq_lens_ptr, slopes_ptr,
                  sinks_ptr, scale, window, soft_cap, token_stride, head_stride, table_stride,
                  NUM_SPLITS: tl.constexpr, NUM_TILES: tl.constexpr, MAX_QUERY_LEN: tl.constexpr,
                  GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr,
                  HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
                  HAS_SINKS: tl.constexpr):  # fmt: skip
    """Grid (splits, kv heads * query tiles, requests): one share of a request's keys;
    NUM_SPLITS 1 writes out directly.
    """
    split, request = tl.program_id(0), tl.program_id(2)
    kv_head, tile = tl.program_id(1) // NUM_TILES, tl.program_id(1) % NUM_TILES
    start = tl.load(query_start_loc_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + request + 1) - start).to(tl.int32)
    first_row = tile * BLOCK_M
    if query_len > MAX_QUERY_LEN:
        return
    if first_row >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - query_len
    rows = first_row + tl.arange(0, BLOCK_M)
    q = load_queries(q_ptr, start, query_len, kv_head, first_row, token_stride, head_stride,
                      GROUP, D, BLOCK_M, BLOCK_D)  # fmt: skip
    slopes = rows.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + kv_head * GROUP + rows % GROUP)
    lowest = tl.zeros_like(seq_len)
    if HAS_WINDOW:
        lowest = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    # The share depends on the request's own length alone, so a fixed NUM_SPLITS makes it independent of the batch.
    share = tl.cdiv(tl.cdiv(seq_len - lowest, NUM_SPLITS), BLOCK_N) * BLOCK_N
    begin = lowest + split * share
    end = tl.minimum(begin + share, seq_len)
    scale = scale * head_scale(key_scale_ptr, kv_head, FORMAT, HAS_SCALE)
    factor = value_factor(value_scale_ptr, kv_head, FORMAT, HAS_SCALE)
    maximum, normaliser = start_softmax(sinks_ptr, kv_head * GROUP + rows % GROUP, BLOCK_M, HAS_SINKS)
    if HAS_SINKS:
        # One split has the sink; its log-sum-exp weighs it where splits are merged.
        maximum = tl.where(split == 0, maximum, float("-inf"))
        normaliser = tl.where(split == 0, normaliser, 0.0)
    acc, maximum, normaliser = _attend_span(
        maximum, normaliser, q, first_position + rows // GROUP, slopes, key_cache_ptr, value_cache_ptr, key_scale_ptr,
        value_scale_ptr, tables_ptr + request * table_stride, kv_head, begin, end, scale, window, soft_cap,
        NUM_KV_HEADS, BLOCK_SIZE, D, BLOCK_M, BLOCK_N, BLOCK_D, FORMAT, HAS_WINDOW, HAS_ALIBI,
        HAS_SOFT_CAP)  # fmt: skip
    if NUM_SPLITS == 1:
        store_rows(out_ptr, acc, factor, normaliser, start, query_len, kv_head, first_row,
                    GROUP, NUM_KV_HEADS, D, BLOCK_M, BLOCK_D)  # fmt: skip
    else:
        safe = tl.where(normaliser == 0.0, 1.0, normaliser)
        partial_rows = (((request * NUM_KV_HEADS + kv_head).to(tl.int64) * NUM_TILES * BLOCK_M) + rows) * NUM_SPLITS
        dims = tl.arange(0, BLOCK_D)
        tl.store(lse_ptr + partial_rows + split, tl.where(normaliser == 0.0, float("-inf"), maximum + tl.log2(safe)))
        partial = partial_ptr + (partial_rows + split)[:, None] * BLOCK_D + dims[None, :]
        tl.store(partial, acc * (factor / safe)[:, None])


@step_kernel
def _merge_kernel(partial_ptr, lse_ptr, out_ptr, query_start_loc_ptr,
                  NUM_SPLITS: tl.constexpr, NUM_ROWS: tl.constexpr, MAX_QUERY_LEN: tl.constexpr,
                  GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
                  D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Grid (rows of a kv head, kv heads, requests): weigh the splits of one row by their log-sum-exp (base 2)."""
    row, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_loc_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + request + 1) - start).to(tl.int32)
    if query_len > MAX_QUERY_LEN:
        return
    if row >= query_len * GROUP:
        return
    dims = tl.arange(0, BLOCK_D)
    first = ((request * NUM_KV_HEADS + kv_head).to(tl.int64) * NUM_ROWS + row) * NUM_SPLITS
    acc = tl.zeros((BLOCK_D,), tl.float32)
    maximum = tl.full((), float("-inf"), tl.float32)
    normaliser = tl.full((), 0.0, tl.float32)
    for split in range(NUM_SPLITS):
        lse = tl.load(lse_ptr + first + split)
        new_maximum = tl.maximum(maximum, lse)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight, rescale = tl.exp2(lse - shift), tl.exp2(maximum - shift)
        acc = acc * rescale + weight * tl.load(partial_ptr + (first + split) * BLOCK_D + dims)
        normaliser = normaliser * rescale + weight
        maximum = new_maximum
    y = acc / tl.where(normaliser == 0.0, 1.0, normaliser)
    out_row = (start + row // GROUP) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    tl.store(out_ptr + out_row * D + dims, y.to(out_ptr.dtype.element_ty), mask=dims < D)


def paged_attention(call: AttentionCall) -> None:
    """See ops.paged_attention; writes call.out.  Launches up to three kernels."""
    num_requests = call.metadata.num_requests
    if call.q.shape[0] == 0 or num_requests == 0:
        return
    if call.metadata.max_query_len <= SHORT_QUERY_LEN:
        _attend_short(call)
    elif num_requests == 1:
        # A lone prompt: no launches that would only find that nothing is short.
        attend_long(call, min_query_len=1)
    else:
        _attend_short(call)
        attend_long(call, min_query_len=SHORT_QUERY_LEN + 1)


def _attend_short(call: AttentionCall) -> None:
    num_requests, num_kv_heads = call.metadata.num_requests, call.cache.num_kv_heads
    group = call.q.shape[1] // num_kv_heads
    num_rows = min(call.metadata.max_query_len, SHORT_QUERY_LEN) * group
    block_m = min(max(triton.next_power_of_2(num_rows), 16), 64)
    num_tiles = triton.cdiv(num_rows, block_m)
    num_splits = call.options.num_kv_splits or _num_splits(call)
    constants = shapes(call, block_m, 64 if call.q.shape[2] <= 128 else 32)
    partial, lse = call.out, call.out
    if num_splits > 1:
        partial_shape = (num_requests, num_kv_heads, num_tiles * block_m, num_splits, constants["BLOCK_D"])
        partial = torch.empty(partial_shape, dtype=torch.float32, device=call.q.device)
        lse = torch.empty(partial_shape[:-1], dtype=torch.float32, device=call.q.device)
    _short_kernel[(num_splits, num_kv_heads * num_tiles, num_requests)](
        call.q,
        *caches(call),
        call.out,
        partial,
        lse,
        call.metadata.block_tables,
        call.metadata.query_start_loc,
        call.metadata.seq_lens,
        *options(call),
        *strides(call),
        NUM_SPLITS=num_splits,
        NUM_TILES=num_tiles,
        MAX_QUERY_LEN=SHORT_QUERY_LEN,
        **constants,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        _merge_kernel[(num_rows, num_kv_heads, num_requests)](
            partial,
            lse,
            call.out,
            call.metadata.query_start_loc,
            NUM_SPLITS=num_splits,
            NUM_ROWS=num_tiles * block_m,
            MAX_QUERY_LEN=SHORT_QUERY_LEN,
            GROUP=group,
            NUM_KV_HEADS=num_kv_heads,
            D=call.q.shape[2],
            BLOCK_D=constants["BLOCK_D"],
            num_warps=4,
        )


def _num_splits(call: AttentionCall) -> int:
    """Enough programs for every SM, none with less than MIN_SPLIT_TOKENS keys of the longest request.

    A power of two: every other number is a kernel to compile, in the middle of serving.
    """
    num_programs = call.metadata.num_requests * call.cache.num_kv_heads
    wanted = triton.cdiv(PROGRAMS_PER_SM * count_sms(call.q.device), num_programs)
    num_splits = max(1, min(wanted, call.metadata.max_seq_len // MIN_SPLIT_TOKENS, MAX_SPLITS))
    return 1 << (num_splits.bit_length() - 1)
