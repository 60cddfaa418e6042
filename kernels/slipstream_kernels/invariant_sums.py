"""Memory of the parts of sums that deterministic mode's kernels leave for a second one.  Sizes only; asks no device.

A kernel leaves parts where a step has too few tiles to fill the GPU, so not the largest step has the most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream_kernels.select import load_module


def invariant_mm_bytes(num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, num_sms: int) -> int:
    """Most that ops.invariant_mm allocates beside its result, of up to so many tokens of `dtype`."""
    mm = load_module("triton", "gemm.invariant_mm")
    num_parts, most = -(-in_features // mm.SPAN), 0
    first = 1
    for last in (*(end for end in mm.TILES if end < num_tokens), num_tokens):  # tokens of one choice of tile
        tile = mm.choose_tile(last, dtype)

        def is_split(count: int, tile: object = tile) -> bool:
            return bool(mm.is_split(count, out_features, in_features, tile, num_sms))

        most = max(most, _last_that(is_split, first, last))
        first = last + 1
    return 4 * num_parts * most * out_features


def invariant_attention_bytes(
    num_tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, max_seq_len: int, num_sms: int
) -> int:
    """Most that ops.invariant_attention allocates beside its result, of up to so many tokens."""
    attention = load_module("triton", "attention.invariant_attention")
    queries = attention.BLOCK_M // (num_q_heads // num_kv_heads)
    if not queries:
        return 0  # one token's rows fit no tile: the reference serves them
    tiling = queries, num_kv_heads, num_q_heads * _power_of_two(head_dim)
    return _attention_bytes(num_tokens, tiling, num_q_heads, max_seq_len, num_sms, attention.MAX_PARTIAL_BYTES)


def invariant_latent_bytes(
    num_tokens: int, num_heads: int, rank: int, dtype: torch.dtype, max_seq_len: int, num_sms: int
) -> int:
    """Most that ops.invariant_latent_attention allocates beside its result, of up to so many tokens of `dtype`."""
    latent = load_module("triton", "attention.invariant_latent_attention")
    rows = latent.FLOAT32_ROWS if dtype == torch.float32 else latent.BLOCK_M
    group = latent.heads_of_a_tile(num_heads, rows)
    tiling = rows // group, num_heads // group, num_heads * _power_of_two(rank)
    return _attention_bytes(num_tokens, tiling, num_heads, max_seq_len, num_sms, num_heads * latent.PARTIAL_BYTES)


def _attention_bytes(
    num_tokens: int, tiling: tuple[int, int, int], num_heads: int, max_seq_len: int, num_sms: int, most_bytes: int
) -> int:
    """tiling: tokens of a tile; tiles that these tokens have, of different heads; sums of a token, of all heads."""
    attention = load_module("triton", "attention.invariant_attention")
    queries, num_groups, num_sums = tiling
    most = 0
    for num_parts in range(2, attention.count_parts(max_seq_len) + 1):  # of shorter sequences too: more tokens fit

        def is_split(count: int, num_parts: int = num_parts) -> bool:
            num_programs = (count // queries + 1) * num_groups  # of one request: more have more tiles
            return bool(attention.is_split(num_programs, count * num_sums, num_parts, num_sms, most_bytes))

        most = max(most, num_parts * _last_that(is_split, 1, num_tokens))
    return 4 * most * (num_sums + 2 * num_heads)  # each row's maximum and normaliser too


def _power_of_two(size: int) -> int:
    """The first from there on."""
    return 1 << (size - 1).bit_length()


def _last_that(holds: Callable[[int], bool], first: int, last: int) -> int:
    """The largest of these numbers that it holds for, or 0; it holds up to some number and for none above."""
    if first > last or not holds(first):
        return 0
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if holds(middle) else (first, middle - 1)
    return first
