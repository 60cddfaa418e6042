"""Attention of many verify rows in CUDA: what decode_attention.py hands on where it pays.  Hopper only.

No device value is read on the host, and the grid depends on shapes alone: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.kv_cache import FP8_DTYPE

SOURCE = "sm90_verify_attention.cu"
HEAD_DIM = 128
TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
KV_TYPES = {torch.bfloat16: 0, torch.float16: 0, FP8_DTYPE: 1}
# Rows (tokens x query heads of a kv head) of a tile, and of a pass of the kernel for few rows; up to 8 that is faster.
TILE_ROWS = 64
MAX_ROWS_OF_FEW, ROWS_OF_A_PASS = 8, 32
# CTAs that may share the keys of a tile.  Two at least, or one of them is left with a context longer than the others'.
SPLITS = (2, 4, 8, 16)
# Where one pass does in the kernel for few rows, as many must fit on the GPU at once; its work is cut to equal parts.
LEAST_SPLITS = {torch.bfloat16: 2, torch.float16: 2, FP8_DTYPE: 4}

POINTERS = (
    "q", "key_cache", "value_cache", "out", "key_scale", "value_scale", "block_tables", "query_start_loc", "seq_lens",
    "tree_mask",
)  # fmt: skip
STRIDES = ("q_token_stride", "q_head_stride", "table_stride")
COUNTS = (
    "num_requests", "num_kv_heads", "group", "block_size_log2", "row_tiles", "splits", "is_dependent",
    "is_prefix_settled",
)  # fmt: skip


class VerifyParams(ctypes.Structure):
    """csrc/params/verify_params.h, field by field."""

    _fields_ = [*fields(POINTERS, STRIDES, COUNTS), ("scale", ctypes.c_float)]


def takes(call: AttentionCall) -> bool:
    """Whether a call that decode_attention.py could take is faster here: most requests have many rows.

    Measured: docs/measurements, 2026-11-21."""
    longest, options = call.metadata.max_query_len, call.options
    rows = longest * (call.q.shape[1] // call.cache.num_kv_heads)
    if longest == 1 or rows <= MAX_ROWS_OF_FEW or 2 * call.q.shape[0] < call.metadata.num_requests * longest:
        return False
    if call.q.dtype not in TYPES or call.cache.dtype not in (call.q.dtype, FP8_DTYPE):
        return False
    if call.q.shape[2] != HEAD_DIM or options.sliding_window or options.soft_cap:
        return False
    if options.alibi_slopes is not None or options.sinks is not None:
        return False
    if call.q.data_ptr() % 16 or call.q.stride(0) % 8 or call.q.stride(1) % 8:
        return False
    if build_refusal(SOURCE, defines(call.q.dtype, call.cache.dtype)) is not None:
        return False
    return rows > ROWS_OF_A_PASS or _splits(call) >= LEAST_SPLITS[call.cache.dtype]


def defines(query: torch.dtype, cache: torch.dtype) -> tuple[str, ...]:
    """The macros that choose a variant of the kernel."""
    return (f"SLIPSTREAM_TYPE={TYPES[query]}", f"SLIPSTREAM_KV={KV_TYPES[cache]}")


def variants() -> list[tuple[str, ...]]:
    """All variants, for building ahead of time."""
    return [defines(query, cache) for query in TYPES for cache in (query, FP8_DTYPE)]


def verify_attention(call: AttentionCall) -> None:
    """See ops.decode_attention; writes call.out.  One launch."""
    library = load(SOURCE, defines(call.q.dtype, call.cache.dtype))
    launch("verify_attention", library, arguments(call, max(_splits(call), SPLITS[0])), call.q.device)


def _row_tiles(call: AttentionCall) -> int:
    group = call.q.shape[1] // call.cache.num_kv_heads
    return -(-call.metadata.max_query_len * group // TILE_ROWS)


def _splits(call: AttentionCall) -> int:
    """CTAs to share the keys of each tile: as many as fit at once; 0 if no two do."""
    units = call.metadata.num_requests * call.cache.num_kv_heads * _row_tiles(call)
    clusters = count_clusters(call.q.device, call.q.dtype, call.cache.dtype)
    return max((size for size, count in clusters.items() if count >= units), default=0)


@lru_cache
def count_clusters(device: torch.device, query: torch.dtype, cache: torch.dtype) -> dict[int, int]:
    """Clusters that run at once on the device, by their number of CTAs."""
    library = load(SOURCE, defines(query, cache))
    with torch.cuda.device(device):
        return {size: int(library.slipstream_count_clusters(size)) for size in SPLITS}


def arguments(call: AttentionCall, splits: int) -> VerifyParams:
    """What a launch takes, with so many CTAs to share the keys of a tile."""
    cache, metadata = call.cache, call.metadata
    num_kv_heads, block_size = cache.key.shape[1:3]
    tensors = {
        "q": call.q, "key_cache": cache.key, "value_cache": cache.value, "out": call.out,
        "key_scale": cache.key_scale, "value_scale": cache.value_scale, "block_tables": metadata.block_tables,
        "query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens, "tree_mask": metadata.tree_mask,
    }  # fmt: skip
    return VerifyParams(
        **addresses(tensors),
        q_token_stride=call.q.stride(0),
        q_head_stride=call.q.stride(1),
        table_stride=metadata.block_tables.stride(0),
        num_requests=metadata.num_requests,
        num_kv_heads=num_kv_heads,
        group=call.q.shape[1] // num_kv_heads,
        block_size_log2=block_size.bit_length() - 1,
        row_tiles=_row_tiles(call),
        splits=splits,
        is_dependent=launches_dependently(call.q.device),
        is_prefix_settled=metadata.is_prefix_settled,
        scale=call.options.scale,
    )
