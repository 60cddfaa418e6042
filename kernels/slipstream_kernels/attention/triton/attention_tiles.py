"""What the paged-attention kernels share: tiles of query rows, and a call's arguments in kernel order.

A row of a tile is one query head of one token: row = query * GROUP + head within its kv head's group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.kv.triton.kv_formats import kv_format


@triton.jit
def find_request(query_start_loc_ptr, num_requests, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The request whose tiles hold `tile`; request r has those from start_r * GROUP // BLOCK_M + r on."""
    low, high = num_requests * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(query_start_loc_ptr + middle) * GROUP // BLOCK_M + middle <= tile
        low, high = tl.where(is_at_or_after, middle, low), tl.where(is_at_or_after, high, middle)
    return low


@triton.jit
def load_queries(q_ptr, start, query_len, kv_head, first_row, token_stride, head_stride,
                 GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """q [BLOCK_M, BLOCK_D] of rows first_row.. of one request's kv head; zero past its last query."""
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    offsets = (start + rows // GROUP) * token_stride + (kv_head * GROUP + rows % GROUP) * head_stride
    mask = (rows < query_len * GROUP)[:, None] & (dims < D)[None, :]
    return tl.load(q_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(out_ptr, acc, factor, normaliser, start, query_len, kv_head, first_row,
               GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Normalise, multiply by factor and write the rows of load_queries."""
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    # A padding request (seq_len 0) saw no key: its rows become zero.
    y = acc * (factor / tl.where(normaliser == 0.0, 1.0, normaliser))[:, None]
    out_rows = (start + rows // GROUP) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
    mask = (rows < query_len * GROUP)[:, None] & (dims < D)[None, :]
    tl.store(out_ptr + out_rows[:, None] * D + dims[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def start_softmax(sinks_ptr, heads, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Maximum (base 2) and normaliser of rows before the first key: those of their heads' sinks, if there are some."""
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks_ptr + heads) * 1.4426950408889634
        normaliser = normaliser + 1.0
    return maximum, normaliser


def caches(call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """Keys, values and their scales; anything where unused."""
    cache = call.cache
    key_scale = cache.key if cache.key_scale is None else cache.key_scale
    value_scale = cache.value if cache.value_scale is None else cache.value_scale
    return cache.key, cache.value, key_scale, value_scale


def options(call: AttentionCall) -> tuple[torch.Tensor | None, torch.Tensor | None, float, int, float]:
    """slopes, sinks, scale, window and soft_cap; anything where unused."""
    own = call.options
    return own.alibi_slopes, own.sinks, own.scale, own.sliding_window or 0, own.soft_cap or 1.0


def flags(call: AttentionCall) -> dict[str, bool]:
    """Which of those options are used."""
    own = call.options
    return {
        "HAS_WINDOW": own.sliding_window is not None,
        "HAS_ALIBI": own.alibi_slopes is not None,
        "HAS_SOFT_CAP": own.soft_cap is not None,
        "HAS_SINKS": own.sinks is not None,
    }


def strides(call: AttentionCall) -> tuple[int, int, int]:
    """Strides of q's tokens and heads, and of the block tables' requests."""
    return call.q.stride(0), call.q.stride(1), call.metadata.block_tables.stride(0)


def shapes(call: AttentionCall, block_m: int, block_n: int) -> dict[str, int | bool]:
    """Constants of both kernels; block_n is cut to the cache's block size, which it then divides."""
    head_dim, (num_kv_heads, block_size) = call.q.shape[2], call.cache.key.shape[1:3]
    return {
        "GROUP": call.q.shape[1] // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "D": head_dim,
        "BLOCK_M": block_m,
        "BLOCK_N": min(block_size, block_n),
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "FORMAT": kv_format(call.cache.dtype),
        "HAS_SCALE": call.cache.key_scale is not None,
        **flags(call),
    }
