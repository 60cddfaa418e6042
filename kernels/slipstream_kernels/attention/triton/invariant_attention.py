"""invariant_attention in Triton-lang: one arithmetic for every row, whatever it is: decode, draft, prompt.

The keys are cut into parts at fixed positions.  Within a part a row takes an online softmax over tiles of keys, and the
parts are merged in order: by the program that computed them where there are tiles of rows enough, else, from memory, by
a second kernel.  Keys that a row does not see change no bit of it: they add 0, and leave its maximum.  Rows of a tree
take the keys on their own path in the order of positions, as plain decoding would, one token a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.triton.attention_tiles import (
    caches,
    find_request,
    flags,
    options,
    start_softmax,
    strides,
)
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.kv.triton.kv_formats import INT8, VALUE_BOOST, gather_rows, head_scale, kv_format, value_factor
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel, two_tensors

# Parts are 512 tokens long, and twice as long after every eight: 48 of them hold 258,048 tokens.
FIRST_PART, PARTS_PER_LENGTH = 512, 8
BLOCK_M = 64  # rows of a tile: the least that Hopper's fast product takes, so that all tiles are the same product
MAX_PARTIAL_BYTES = 64 << 20
# Two kernels that do the same sums must round alike: no product is fused with a sum but by name.
EXACT = {"enable_fp_fusion": False}


@triton.jit
def part_begin(part, FIRST: tl.constexpr, PER_LENGTH: tl.constexpr):
    """The position at which a part begins."""
    stretch = (tl.zeros_like(part) + 1) << (part // PER_LENGTH)
    return FIRST * (PER_LENGTH * (stretch - 1) + part % PER_LENGTH * stretch)


@triton.jit
def merge_part(total, maximum, normaliser, part_sum, part_maximum, part_normaliser):
    """Add a part to those before it."""
    new_maximum = tl.maximum(maximum, part_maximum)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    kept, added = tl.exp2(maximum - shift), tl.exp2(part_maximum - shift)
    total = tl.fma(part_sum, tl.broadcast_to(added[:, None], part_sum.shape), total * kept[:, None])
    return total, new_maximum, tl.fma(part_normaliser, added, normaliser * kept)


@triton.jit
def add_scores(scores, maximum, normaliser):
    """A tile of scores (base 2) joins an online softmax: probabilities, the factor on sums so far, the new state."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that has seen no key yet: exp2(-inf - -inf) would be NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    probs = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(maximum - shift)
    return probs, rescale, new_maximum, tl.fma(normaliser, rescale, tl.sum(probs, axis=1))


@triton.jit
def find_queries(query_start_loc_ptr, num_requests, tile, QUERIES: tl.constexpr):
    """Of a tile: its request, where that begins, its number of tokens, and which of them is the tile's first."""
    request = find_request(query_start_loc_ptr, num_requests, tile, 1, QUERIES)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    return request, start, query_len, (tile - (start // QUERIES + request)) * QUERIES


@triton.jit
def place_rows(start, query_len, first_query, seq_len, tree_mask_ptr, positions_ptr, QUERIES: tl.constexpr,
               GROUP: tl.constexpr, BLOCK_M: tl.constexpr, HAS_TREE: tl.constexpr):  # fmt: skip
    """Of a tile's rows: whether there is one, its token, its position; the tree mask, and where their keys end."""
    queries, prefix = tl.arange(0, BLOCK_M) // GROUP, seq_len - query_len
    is_row = (queries < QUERIES) & (first_query + queries < query_len)
    tokens = (start + first_query).to(tl.int64) + queries
    if HAS_TREE:
        position = tl.load(positions_ptr + start + first_query).to(tl.int32)
        positions = position + queries * 0
        tree_mask = tl.load(tree_mask_ptr + start + first_query)
        end = tl.minimum(seq_len, position + 1)
    else:
        positions = prefix + first_query + queries
        tree_mask = 0
        end = tl.minimum(seq_len, prefix + first_query + QUERIES)
    return is_row, tokens, positions, tree_mask, end


@triton.jit
def slots_of(keys, prefix, tree_mask):
    """Slots of the keys at these positions on the path of a row: the n-th after the prefix is its n-th set bit."""
    bits = tl.arange(0, 64)
    is_set = ((tree_mask >> bits.to(tl.int64)) & 1).to(tl.int32)
    ranks = tl.where(is_set > 0, tl.cumsum(is_set, axis=0) - 1, -1)
    own = tl.sum(tl.where(ranks[None, :] == (keys - prefix)[:, None], bits[None, :], 0), axis=1)
    return tl.where(keys < prefix, keys, prefix + own)


@triton.jit
def _attend_part(q, positions, slopes, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, table_ptr,
                 kv_head, begin, stop, end, prefix, tree_mask, scale, window, soft_cap,
                 NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, HAS_WINDOW: tl.constexpr,
                 HAS_ALIBI: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_TREE: tl.constexpr):  # fmt: skip
    """Online softmax (base 2) over the keys at positions [begin, stop): sum of values, maximum, normaliser."""
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first_key in range(begin, stop, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        is_key = keys < end
        if HAS_TREE:
            slots = slots_of(keys, prefix, tree_mask)
            blocks = tl.load(table_ptr + slots // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            rows = (blocks * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slots % BLOCK_SIZE
        else:
            block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
            first_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first_key % BLOCK_SIZE
            rows = first_row + tl.arange(0, BLOCK_N)
        k = gather_rows(key_cache_ptr, rows, is_key, q.dtype, FORMAT, D, BLOCK_N, BLOCK_D)
        scores = dot(q, tl.trans(k)) * scale
        if FORMAT >= INT8:
            scores *= tl.load(key_scale_ptr + rows, mask=is_key, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        if HAS_ALIBI:
            scores = tl.fma(tl.broadcast_to(slopes[:, None], scores.shape),
                            (keys[None, :] - positions[:, None]).to(tl.float32), scores)  # fmt: skip
        if HAS_SOFT_CAP or HAS_ALIBI:
            scores *= 1.4426950408889634
        seen = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            seen = seen & (positions[:, None] - keys[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
        probs, rescale, maximum, normaliser = add_scores(scores, maximum, normaliser)
        if FORMAT >= INT8:
            probs *= tl.load(value_scale_ptr + rows, mask=is_key, other=0.0)[None, :] * VALUE_BOOST
        v = gather_rows(value_cache_ptr, rows, is_key, q.dtype, FORMAT, D, BLOCK_N, BLOCK_D)
        acc = acc * rescale[:, None] + dot(probs.to(v.dtype), v)
    return acc, maximum, normaliser


@triton.jit
def store_normalised(out_ptr, places, is_row, total, normaliser, factor, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Normalise and write rows at out_ptr + places * D.  A padding request saw no key: its rows become zero."""
    dims = tl.arange(0, BLOCK_D)
    y = total * (factor / tl.where(normaliser == 0.0, 1.0, normaliser))[:, None]
    mask = is_row[:, None] & (dims < D)[None, :]
    tl.store(out_ptr + places[:, None] * D + dims[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@step_kernel
def _invariant_attention_kernel(q_ptr, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, out_ptr,
                                partial_ptr, maxima_ptr, normalisers_ptr, tables_ptr, query_start_loc_ptr,
                                seq_lens_ptr, tree_mask_ptr, positions_ptr, num_requests, slopes_ptr, sinks_ptr,
                                scale, window, soft_cap, token_stride, head_stride, table_stride,
                                QUERIES: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
                                BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                                BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
                                HAS_SCALE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr,
                                HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_TREE: tl.constexpr,
                                IS_SPLIT: tl.constexpr, NUM_PARTS: tl.constexpr, FIRST: tl.constexpr,
                                PER_LENGTH: tl.constexpr):  # fmt: skip
    """Grid (tiles of QUERIES tokens, kv heads, parts if IS_SPLIT); a row is one query head of one token."""
    tile, kv_head, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, start, query_len, first_query = find_queries(query_start_loc_ptr, num_requests, tile, QUERIES)
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    prefix = seq_len - query_len
    heads = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    is_row, tokens, positions, tree_mask, end = place_rows(
        start, query_len, first_query, seq_len, tree_mask_ptr, positions_ptr, QUERIES, GROUP, BLOCK_M, HAS_TREE
    )
    if IS_SPLIT and part_begin(part, FIRST, PER_LENGTH) >= end:
        return
    dims = tl.arange(0, BLOCK_D)
    offsets = tokens * token_stride + heads * head_stride
    q = tl.load(q_ptr + offsets[:, None] + dims[None, :], mask=is_row[:, None] & (dims < D)[None, :], other=0.0)
    lowest = tl.zeros_like(seq_len)
    if HAS_WINDOW:
        lowest = tl.maximum(prefix + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
        if HAS_TREE:
            lowest = tl.maximum(end - window, 0) // BLOCK_N * BLOCK_N
    scale = scale * head_scale(key_scale_ptr, kv_head, FORMAT, HAS_SCALE)
    if not (HAS_SOFT_CAP or HAS_ALIBI):
        scale *= 1.4426950408889634
    slopes = positions.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    maximum, normaliser = start_softmax(sinks_ptr, heads, BLOCK_M, HAS_SINKS and not IS_SPLIT)
    begin, stop = part_begin(part, FIRST, PER_LENGTH), end
    if IS_SPLIT:
        stop = tl.minimum(end, begin + 1)  # one turn of the loop
    while begin < stop:
        part += 1
        next_begin = part_begin(part, FIRST, PER_LENGTH)
        part_sum, part_maximum, part_normaliser = _attend_part(
            q, positions, slopes, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, table_ptr, kv_head,
            tl.maximum(begin, lowest), tl.minimum(next_begin, end), end, prefix, tree_mask, scale, window,
            soft_cap, NUM_KV_HEADS, BLOCK_SIZE, D, BLOCK_M, BLOCK_N, BLOCK_D, FORMAT, HAS_WINDOW, HAS_ALIBI,
            HAS_SOFT_CAP, HAS_TREE)  # fmt: skip
        # Of the first part without sinks this is the part itself, to the bit.
        total, maximum, normaliser = merge_part(total, maximum, normaliser, part_sum, part_maximum, part_normaliser)
        begin = next_begin
    places = tokens * (NUM_KV_HEADS * GROUP) + heads
    if IS_SPLIT:
        places = places * NUM_PARTS + tl.program_id(2)
        tl.store(maxima_ptr + places, maximum, mask=is_row)
        tl.store(normalisers_ptr + places, normaliser, mask=is_row)
        tl.store(partial_ptr + places[:, None] * BLOCK_D + dims[None, :], total, mask=is_row[:, None])
    else:
        factor = value_factor(value_scale_ptr, kv_head, FORMAT, HAS_SCALE)
        store_normalised(out_ptr, places, is_row, total, normaliser, factor, D, BLOCK_D)


@step_kernel
def _merge_parts_kernel(partial_ptr, maxima_ptr, normalisers_ptr, value_scale_ptr, out_ptr, query_start_loc_ptr,
                        seq_lens_ptr, positions_ptr, num_requests, sinks_ptr,
                        GROUP: tl.constexpr, ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr,
                        BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_TREE: tl.constexpr,
                        HAS_SINKS: tl.constexpr, NUM_PARTS: tl.constexpr, FIRST: tl.constexpr,
                        PER_LENGTH: tl.constexpr):  # fmt: skip
    """Grid (tokens, kv heads): the heads of one token, as the other kernel merges them."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(query_start_loc_ptr + num_requests):
        return
    # Of requests without tokens of their own, which begin where the next one does, the last is found.
    low, high = num_requests * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(query_start_loc_ptr + middle) <= token
        low, high = tl.where(is_at_or_after, middle, low), tl.where(is_at_or_after, high, middle)
    seq_len = tl.load(seq_lens_ptr + low)
    position = seq_len - tl.load(query_start_loc_ptr + low + 1) + token
    if HAS_TREE:
        position = tl.load(positions_ptr + token).to(tl.int32)
    end = tl.minimum(seq_len, position + 1)
    heads, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    is_row = heads < GROUP
    places = token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + heads
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    maximum, normaliser = start_softmax(sinks_ptr, kv_head * GROUP + heads % GROUP, ROWS, HAS_SINKS)
    part, begin = low * 0, low * 0
    while begin < end:
        stored = places * NUM_PARTS + part
        part_maximum = tl.load(maxima_ptr + stored, mask=is_row, other=float("-inf"))
        part_normaliser = tl.load(normalisers_ptr + stored, mask=is_row, other=0.0)
        part_sum = tl.load(partial_ptr + stored[:, None] * BLOCK_D + dims[None, :], mask=is_row[:, None], other=0.0)
        total, maximum, normaliser = merge_part(total, maximum, normaliser, part_sum, part_maximum, part_normaliser)
        part += 1
        begin = part_begin(part, FIRST, PER_LENGTH)
    factor = value_factor(value_scale_ptr, kv_head, FORMAT, HAS_SCALE)
    store_normalised(out_ptr, places, is_row, total, normaliser, factor, D, BLOCK_D)


def count_parts(max_seq_len: int) -> int:
    """Parts of a sequence of that many tokens; any cut at fixed positions would do."""
    parts, begin, length = 0, 0, FIRST_PART
    while begin < max_seq_len:
        parts, begin = parts + 1, begin + length
        length *= 2 if parts % PARTS_PER_LENGTH == 0 else 1
    return max(parts, 1)


def is_split(
    num_programs: int, num_sums: int, num_parts: int, num_sms: int, most_bytes: int = MAX_PARTIAL_BYTES
) -> bool:
    """Whether parts are programs of their own: when tiles alone do not fill the GPU twice.  Either gives the same.

    num_sums: fp32 numbers that a part leaves, of all rows; most_bytes: that all parts may.
    """
    return num_parts > 1 and num_programs < 2 * num_sms and 4 * num_sums * num_parts <= most_bytes


def invariant_attention(call: AttentionCall) -> None:
    """See ops.invariant_attention; writes call.out.  One or two launches."""
    metadata, sinks = call.metadata, call.options.sinks
    (num_tokens, num_q_heads, head_dim), num_requests = call.q.shape, metadata.num_requests
    num_kv_heads, block_size = call.cache.key.shape[1:3]
    if num_tokens == 0 or num_requests == 0:
        return
    group, has_tree = num_q_heads // num_kv_heads, metadata.tree_mask is not None
    queries = 1 if has_tree else BLOCK_M // group
    num_tiles = num_tokens // queries + num_requests  # each request may end within a tile
    block_d, num_parts = triton.next_power_of_2(head_dim), count_parts(metadata.max_seq_len)
    num_rows = num_tokens * num_q_heads
    splits = is_split(num_tiles * num_kv_heads, num_rows * block_d, num_parts, count_sms(call.q.device))
    partial = maxima = normalisers = call.out
    if splits:
        partial = torch.empty(num_rows * num_parts * block_d, dtype=torch.float32, device=call.q.device)
        maxima, normalisers = two_tensors(num_rows * num_parts, device=call.q.device)
    unused = metadata.seq_lens, metadata.seq_lens
    tree_mask, positions = (metadata.tree_mask, metadata.positions) if has_tree else unused
    shape = {
        "GROUP": group, "NUM_KV_HEADS": num_kv_heads, "D": head_dim, "BLOCK_D": block_d, "HAS_TREE": has_tree,
        "FORMAT": kv_format(call.cache.dtype), "HAS_SCALE": call.cache.key_scale is not None,
        "NUM_PARTS": num_parts if splits else 1, "FIRST": FIRST_PART, "PER_LENGTH": PARTS_PER_LENGTH,
    }  # fmt: skip
    _invariant_attention_kernel[(num_tiles, num_kv_heads, num_parts if splits else 1)](
        call.q, *caches(call), call.out, partial, maxima, normalisers, metadata.block_tables,
        metadata.query_start_loc, metadata.seq_lens, tree_mask, positions, num_requests, *options(call), *strides(call),
        QUERIES=queries, BLOCK_SIZE=block_size, BLOCK_M=BLOCK_M,
        BLOCK_N=min(block_size, 32 if call.q.dtype == torch.float32 or head_dim > 128 else 64),
        IS_SPLIT=splits, **flags(call),
        num_warps=8 if head_dim > 128 else 4, num_stages=2, **EXACT, **shape,
    )  # fmt: skip
    if splits:
        _merge_parts_kernel[(num_tokens, num_kv_heads)](
            partial, maxima, normalisers, caches(call)[3], call.out, metadata.query_start_loc, metadata.seq_lens,
            positions, num_requests, sinks, ROWS=triton.next_power_of_2(group), num_warps=4,
            HAS_SINKS=sinks is not None, **EXACT, **shape,
        )  # fmt: skip
