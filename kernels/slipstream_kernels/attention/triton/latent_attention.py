"""Latent attention in Triton-lang: all heads of a token are rows of a tile, which reads each latent once for both
products. Long contexts of few requests are split over programs and merged by log-sum-exp.

Grids depend on host integers only (no device read, CUDA-graph safe); a program that finds nothing to do returns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.attention.triton.attention_tiles import find_request
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.kv.triton.latent_rows import latent_pointers, latent_shape, load_latents, load_rope_keys
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel

MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64
PROGRAMS_PER_SM = 2
# Keys of a tile of 16-bit rows: with 64, 128 requests over 4k take 0.19 ms with 16 heads and 0.58 with 128; with 32,
# 0.22 and 0.87. FP8 rows, which become 16-bit ones first, have been measured with 32 alone.
LARGEST_BLOCK_N = 64
MERGED_FEATURES = 128  # of a program that merges splits


@triton.jit
def _attend(q, q_rope, token_rows, masks, prefix, values_ptr, scales_ptr, rope_ptr, values_stride, scales_stride,
            rope_stride, table_ptr, begin, end, scale,
            RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
            BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_FP8: tl.constexpr,
            HAS_TREE: tl.constexpr):  # fmt: skip
    """Online softmax (base 2) over keys [begin, end); begin is a multiple of BLOCK_N, which divides BLOCK_SIZE.

    token_rows: of each row, its token's place among the request's own; prefix: keys before those.
    """
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first_key in range(begin, end, BLOCK_N):
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        keys = first_key + tl.arange(0, BLOCK_N)
        rows = block * BLOCK_SIZE + first_key % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        is_key = keys < end
        c = load_latents(values_ptr, scales_ptr, rows, is_key, values_stride, scales_stride, q.dtype, RANK, BLOCK_N,
                         BLOCK_R, IS_FP8)  # fmt: skip
        k = load_rope_keys(rope_ptr, rows, is_key, rope_stride, q.dtype, ROPE, BLOCK_P)
        scores = (dot(q, tl.trans(c)) + dot(q_rope, tl.trans(k))) * (scale * 1.4426950408889634)
        own = keys[None, :] - prefix
        if HAS_TREE:
            bits = (masks[:, None] >> tl.maximum(own, 0).to(tl.int64)) & 1
            seen = (own < 0) | (bits == 1)
        else:
            seen = own <= token_rows[:, None]
        scores = tl.where(seen & is_key[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen no key yet: exp2(-inf - -inf) would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probs = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        normaliser = normaliser * rescale + tl.sum(probs, axis=1)
        acc = acc * rescale[:, None] + dot(probs.to(c.dtype), c)
        maximum = new_maximum
    return acc, maximum, normaliser


@step_kernel
def _latent_attention_kernel(
    q_ptr, values_ptr, scales_ptr, rope_ptr, values_stride, scales_stride, rope_stride, out_ptr, partial_ptr, lse_ptr,
    tables_ptr, query_start_loc_ptr, seq_lens_ptr, tree_mask_ptr, num_requests, scale, table_stride,
    HEADS: tl.constexpr, NUM_SPLITS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr, HAS_TREE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (splits, row tiles of all requests): one share of a request's keys; NUM_SPLITS 1 writes out directly."""
    start_dependents(DEPENDENT)
    split, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    request = find_request(query_start_loc_ptr, num_requests, tile, HEADS, BLOCK_M)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    first_row = (tile - (start * HEADS // BLOCK_M + request)) * BLOCK_M
    await_previous(DEPENDENT)
    if first_row >= query_len * HEADS:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    prefix = seq_len - query_len
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < query_len * HEADS
    places = start.to(tl.int64) * HEADS + rows
    features, keys = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    row_ptr = q_ptr + places[:, None] * (RANK + ROPE)
    q = tl.load(row_ptr + features, mask=is_row[:, None] & (features < RANK), other=0.0)
    q_rope = tl.load(row_ptr + RANK + keys, mask=is_row[:, None] & (keys < ROPE), other=0.0)
    masks = places
    end = tl.maximum(tl.minimum(seq_len, prefix + (first_row + BLOCK_M - 1) // HEADS + 1), 0)
    if HAS_TREE:
        masks = tl.load(tree_mask_ptr + start + rows // HEADS, mask=is_row, other=1)
        end = seq_len
    # The share depends on the request's own length alone, so a fixed NUM_SPLITS makes it independent of the batch.
    share = tl.cdiv(tl.cdiv(seq_len, NUM_SPLITS), BLOCK_N) * BLOCK_N
    begin = split * share
    acc, maximum, normaliser = _attend(
        q, q_rope, rows // HEADS, masks, prefix, values_ptr, scales_ptr, rope_ptr, values_stride, scales_stride,
        rope_stride, tables_ptr + request.to(tl.int64) * table_stride, begin, tl.minimum(begin + share, end), scale,
        RANK, ROPE, BLOCK_SIZE, BLOCK_R, BLOCK_P, BLOCK_M, BLOCK_N, IS_FP8, HAS_TREE)  # fmt: skip
    # A padding request (seq_len 0) saw no key: its rows become zero.
    safe = tl.where(normaliser == 0.0, 1.0, normaliser)
    y = acc / safe[:, None]
    if NUM_SPLITS == 1:
        mask = is_row[:, None] & (features < RANK)
        tl.store(out_ptr + places[:, None] * RANK + features, y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        places = places * NUM_SPLITS + split
        lse = tl.where(normaliser == 0.0, float("-inf"), maximum + tl.log2(safe))
        tl.store(lse_ptr + places, lse, mask=is_row)
        tl.store(partial_ptr + places[:, None] * BLOCK_R + features, y, mask=is_row[:, None])


@step_kernel
def _merge_splits_kernel(partial_ptr, lse_ptr, out_ptr, query_start_loc_ptr, num_requests, HEADS: tl.constexpr,
                         NUM_SPLITS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
                         COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Grid (rows, BLOCK_R / COLUMNS): weigh the splits of one head of a token by their log-sum-exp (base 2).

    All splits are loaded at once: one after the other, 64 of them took 23 us. Those without keys are not read.
    """
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(query_start_loc_ptr + num_requests) * HEADS:
        return
    splits, features = tl.arange(0, NUM_SPLITS), column * COLUMNS + tl.arange(0, COLUMNS)
    lse = tl.load(lse_ptr + row * NUM_SPLITS + splits)
    maximum = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(weights, axis=0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    places = (row * NUM_SPLITS + splits)[:, None] * BLOCK_R + features[None, :]
    parts = tl.load(partial_ptr + places, mask=(weights > 0.0)[:, None], other=0.0)
    y = tl.sum(parts * weights[:, None], axis=0)
    tl.store(out_ptr + row * RANK + features, y.to(out_ptr.dtype.element_ty), mask=features < RANK)


def latent_attention(call: LatentCall) -> None:
    """See ops.latent_attention; writes call.out.  One or two launches."""
    metadata = call.metadata
    (num_tokens, num_heads, _), num_requests = call.q.shape, metadata.num_requests
    if num_tokens == 0 or num_requests == 0:
        return
    block_m = _tile_rows(call)
    num_tiles = num_tokens * num_heads // block_m + num_requests  # each request may end within a tile
    num_splits = _num_splits(call, num_tiles)
    shape = latent_shape(call.cache)
    partial = lse = call.out
    if num_splits > 1:
        num_partials = num_tokens * num_heads * num_splits
        partial = torch.empty(num_partials, shape["BLOCK_R"], dtype=torch.float32, device=call.q.device)
        lse = torch.empty(num_partials, dtype=torch.float32, device=call.q.device)
    has_tree, dependent = metadata.tree_mask is not None, dependent_launch(call.q.device)
    _latent_attention_kernel[(num_splits, num_tiles)](
        call.q, *latent_pointers(call.cache), call.out, partial, lse, metadata.block_tables, metadata.query_start_loc,
        metadata.seq_lens, metadata.tree_mask if has_tree else metadata.seq_lens, num_requests, call.scale,
        metadata.block_tables.stride(0), HEADS=num_heads, NUM_SPLITS=num_splits, BLOCK_M=block_m,
        BLOCK_N=_tile_keys(call, block_m), HAS_TREE=has_tree,
        num_warps=8 if block_m > 16 else 4, num_stages=1 if call.q.dtype == torch.float32 else 2, **shape, **dependent,
    )  # fmt: skip
    if num_splits > 1:
        columns = min(shape["BLOCK_R"], MERGED_FEATURES)
        _merge_splits_kernel[(num_tokens * num_heads, shape["BLOCK_R"] // columns)](
            partial, lse, call.out, metadata.query_start_loc, num_requests, HEADS=num_heads, NUM_SPLITS=num_splits,
            RANK=call.rank, BLOCK_R=shape["BLOCK_R"], COLUMNS=columns, num_warps=4, **dependent,
        )  # fmt: skip


def _tile_rows(call: LatentCall) -> int:
    """Rows of a tile: those of one request, at most 64; fp32 keeps 16, whose tiles take twice the memory."""
    num_rows = call.metadata.max_query_len * call.q.shape[1]
    if call.q.dtype == torch.float32:
        return 16
    return min(max(triton.next_power_of_2(num_rows), 16), 64)


def _tile_keys(call: LatentCall, block_m: int) -> int:
    """Keys of a tile: within one block, and what shared memory holds (64 rows and 64 keys: 216 KiB; 16 and 64, 32 and
    32, 64 and 16: less than 99 KiB)."""
    if call.q.dtype == torch.float32:
        largest = 16
    elif block_m > 16 and has_small_shared_memory(call.q.device):
        largest = 1024 // block_m
    elif call.cache.is_fp8 or (block_m > 32 and hopper_refusal(call.q.device, "q is") is not None):
        largest = 32
    else:
        largest = LARGEST_BLOCK_N
    return min(call.cache.block_size, largest)


def _num_splits(call: LatentCall, num_tiles: int) -> int:
    """Enough programs for every SM, none with less than MIN_SPLIT_TOKENS keys of the longest request.

    A power of two: every other number is a kernel to compile, in the middle of serving.
    """
    wanted = triton.cdiv(PROGRAMS_PER_SM * count_sms(call.q.device), num_tiles)
    num_splits = max(1, min(wanted, call.metadata.max_seq_len // MIN_SPLIT_TOKENS, MAX_SPLITS))
    return 1 << (num_splits.bit_length() - 1)


@lru_cache
def has_small_shared_memory(device: torch.device) -> bool:
    """Whether a program has less than 128 KiB: with compute capability 8.6, 8.9 and 12.0 it has 99."""
    if device.type != "cuda":
        return False
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return bool(properties["max_shared_mem"] < 128 << 10)
