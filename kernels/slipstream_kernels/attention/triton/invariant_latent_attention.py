"""invariant_latent_attention in Triton-lang: invariant_attention's parts and order of keys, over rows of latents.

A tile has query heads of one token or of several, of which each latent is read once for both products.  Every step has
the same tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.attention.triton.invariant_attention import (
    BLOCK_M,
    EXACT,
    FIRST_PART,
    PARTS_PER_LENGTH,
    _merge_parts_kernel,
    add_scores,
    count_parts,
    find_queries,
    is_split,
    merge_part,
    part_begin,
    place_rows,
    slots_of,
    store_normalised,
)
from slipstream_kernels.attention.triton.latent_attention import has_small_shared_memory
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.kv.triton.latent_rows import latent_pointers, latent_shape, load_latents, load_rope_keys
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel, two_tensors

FLOAT32_ROWS, FLOAT32_KEYS = 16, 16  # of a tile
# Of a head: what its keys and values of a piece of a prompt's cached tokens would take, which this mode never makes.
PARTIAL_BYTES = 4 << 20


@triton.jit
def _attend_part(q, q_rope, positions, values_ptr, scales_ptr, rope_ptr, values_stride, scales_stride, rope_stride,
                 table_ptr, begin, stop, end, prefix, tree_mask, scale,
                 RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_FP8: tl.constexpr,
                 HAS_TREE: tl.constexpr):  # fmt: skip
    """Online softmax (base 2) over the latents at positions [begin, stop): their sum, maximum, normaliser."""
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first_key in range(begin, stop, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        is_key = keys < end
        if HAS_TREE:
            slots = slots_of(keys, prefix, tree_mask)
            blocks = tl.load(table_ptr + slots // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            rows = blocks * BLOCK_SIZE + slots % BLOCK_SIZE
        else:
            block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
            rows = block * BLOCK_SIZE + first_key % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        c = load_latents(values_ptr, scales_ptr, rows, is_key, values_stride, scales_stride, q.dtype, RANK, BLOCK_N,
                         BLOCK_R, IS_FP8)  # fmt: skip
        k = load_rope_keys(rope_ptr, rows, is_key, rope_stride, q.dtype, ROPE, BLOCK_P)
        scores = (dot(q, tl.trans(c)) + dot(q_rope, tl.trans(k))) * scale
        seen = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        probs, rescale, maximum, normaliser = add_scores(scores, maximum, normaliser)
        acc = acc * rescale[:, None] + dot(probs.to(c.dtype), c)
    return acc, maximum, normaliser


@step_kernel
def _invariant_latent_attention_kernel(
    q_ptr, values_ptr, scales_ptr, rope_ptr, values_stride, scales_stride, rope_stride, out_ptr, partial_ptr,
    maxima_ptr, normalisers_ptr, tables_ptr, query_start_loc_ptr, seq_lens_ptr, tree_mask_ptr, positions_ptr,
    num_requests, scale, table_stride,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_FP8: tl.constexpr, HAS_TREE: tl.constexpr, IS_SPLIT: tl.constexpr,
    NUM_PARTS: tl.constexpr, FIRST: tl.constexpr, PER_LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of QUERIES tokens, groups of heads, parts if IS_SPLIT); a row is one head of one token."""
    tile, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2)
    request, start, query_len, first_query = find_queries(query_start_loc_ptr, num_requests, tile, QUERIES)
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    is_row, tokens, positions, tree_mask, end = place_rows(
        start, query_len, first_query, seq_len, tree_mask_ptr, positions_ptr, QUERIES, GROUP, BLOCK_M, HAS_TREE
    )
    if IS_SPLIT and part_begin(part, FIRST, PER_LENGTH) >= end:
        return
    places = tokens * HEADS + tl.program_id(1) * GROUP + tl.arange(0, BLOCK_M) % GROUP
    features, keys = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    row_ptr = q_ptr + places[:, None] * (RANK + ROPE)
    q = tl.load(row_ptr + features, mask=is_row[:, None] & (features < RANK), other=0.0)
    q_rope = tl.load(row_ptr + RANK + keys, mask=is_row[:, None] & (keys < ROPE), other=0.0)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    begin, stop = part_begin(part, FIRST, PER_LENGTH), end
    if IS_SPLIT:
        stop = tl.minimum(end, begin + 1)  # one turn of the loop
    while begin < stop:
        part += 1
        next_begin = part_begin(part, FIRST, PER_LENGTH)
        part_sum, part_maximum, part_normaliser = _attend_part(
            q,
            q_rope,
            positions,
            values_ptr,
            scales_ptr,
            rope_ptr,
            values_stride,
            scales_stride,
            rope_stride,
            table_ptr,
            begin,
            tl.minimum(next_begin, end),
            end,
            seq_len - query_len,
            tree_mask,
            scale * 1.4426950408889634,
            RANK,
            ROPE,
            BLOCK_SIZE,
            BLOCK_R,
            BLOCK_P,
            BLOCK_M,
            BLOCK_N,
            IS_FP8,
            HAS_TREE,
        )
        total, maximum, normaliser = merge_part(total, maximum, normaliser, part_sum, part_maximum, part_normaliser)
        begin = next_begin
    if IS_SPLIT:
        places = places * NUM_PARTS + tl.program_id(2)
        tl.store(maxima_ptr + places, maximum, mask=is_row)
        tl.store(normalisers_ptr + places, normaliser, mask=is_row)
        tl.store(partial_ptr + places[:, None] * BLOCK_R + features, total, mask=is_row[:, None])
    else:
        store_normalised(out_ptr, places, is_row, total, normaliser, 1.0, RANK, BLOCK_R)


def invariant_latent_attention(call: LatentCall) -> None:
    """See ops.invariant_latent_attention; writes call.out.  One or two launches."""
    metadata = call.metadata
    (num_tokens, num_heads, _), num_requests = call.q.shape, metadata.num_requests
    if num_tokens == 0 or num_requests == 0:
        return
    shape, has_tree = latent_shape(call.cache), metadata.tree_mask is not None
    block_m, block_n, num_stages = _tile(call)
    group = heads_of_a_tile(num_heads, block_m)
    queries, num_groups = 1 if has_tree else block_m // group, num_heads // group
    num_tiles, num_parts = num_tokens // queries + num_requests, count_parts(metadata.max_seq_len)
    num_rows, block_r = num_tokens * num_heads, int(shape["BLOCK_R"])
    splits = is_split(
        num_tiles * num_groups, num_rows * block_r, num_parts, count_sms(call.q.device), num_heads * PARTIAL_BYTES
    )
    num_parts = num_parts if splits else 1
    partial = maxima = normalisers = call.out
    if splits:
        partial = torch.empty(num_rows * num_parts * block_r, dtype=torch.float32, device=call.q.device)
        maxima, normalisers = two_tensors(num_rows * num_parts, device=call.q.device)
    unused = metadata.seq_lens, metadata.seq_lens
    tree_mask, positions = (metadata.tree_mask, metadata.positions) if has_tree else unused
    parts = {"NUM_PARTS": num_parts, "FIRST": FIRST_PART, "PER_LENGTH": PARTS_PER_LENGTH, "HAS_TREE": has_tree}
    _invariant_latent_attention_kernel[(num_tiles, num_groups, num_parts)](
        call.q, *latent_pointers(call.cache), call.out, partial, maxima, normalisers, metadata.block_tables,
        metadata.query_start_loc, metadata.seq_lens, tree_mask, positions, num_requests, call.scale,
        metadata.block_tables.stride(0), QUERIES=queries, GROUP=group, HEADS=num_heads, BLOCK_M=block_m,
        BLOCK_N=block_n, IS_SPLIT=splits, num_warps=8, num_stages=num_stages, **EXACT, **shape, **parts,
    )  # fmt: skip
    if splits:
        _merge_parts_kernel[(num_tokens, num_heads)](
            partial, maxima, normalisers, call.out, call.out, metadata.query_start_loc, metadata.seq_lens, positions,
            num_requests, None, GROUP=1, ROWS=1, NUM_KV_HEADS=num_heads, D=call.rank, BLOCK_D=block_r, FORMAT=0,
            HAS_SCALE=False, HAS_SINKS=False, num_warps=4, **EXACT, **parts,
        )  # fmt: skip


def _tile(call: LatentCall) -> tuple[int, int, int]:
    """Rows and keys of a tile and tiles of keys in flight, by the model and the GPU alone: what shared memory holds."""
    if call.q.dtype == torch.float32:
        rows, keys, num_stages = FLOAT32_ROWS, FLOAT32_KEYS, 1
    elif has_small_shared_memory(call.q.device):
        rows, keys, num_stages = BLOCK_M, 16, 1
    else:
        rows, keys, num_stages = BLOCK_M, 32, 2
    return rows, min(keys, call.cache.block_size), num_stages


def heads_of_a_tile(num_heads: int, block_m: int) -> int:
    """The most that fit a tile and share the heads evenly."""
    return next(group for group in range(min(num_heads, block_m), 0, -1) if num_heads % group == 0)
