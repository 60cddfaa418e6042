"""Attention of many verify rows in CUDA: what decode_attention.py hands on where it pays.  Hopper only.

No device value is read on the host, and the grid depends on shapes alone: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.decode_call import DecodeCall
from slipstream_kernels.dependent_launch import launches_dependently

SOURCE = "verify_attention.cu"
HEAD_DIM = 128
TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# Rows (of tokens x query heads of a kv head) of a tile; up to so many the kernel for few rows is faster.
TILE_ROWS = 64
MAX_ROWS_OF_FEW = 8
SPLITS = (1, 2, 4, 8)
# Of more tiles than run at once: a context much longer than the others is not one CTA's alone.
SPLITS_OF_MANY = 2

POINTERS = (
    "q", "key_cache", "value_cache", "out", "block_tables", "query_start_loc", "seq_lens", "tree_mask",
)  # fmt: skip
STRIDES = ("q_token_stride", "q_head_stride", "table_stride")
COUNTS = (
    "num_requests", "num_kv_heads", "group", "block_size_log2", "row_tiles", "splits", "is_dependent",
    "is_prefix_settled",
)  # fmt: skip


class VerifyParams(ctypes.Structure):
    """include/verify_params.h, field by field."""

    _fields_ = [*fields(POINTERS, STRIDES, COUNTS), ("scale", ctypes.c_float)]


def takes(call: DecodeCall) -> bool:
    """Whether a call that decode_attention.py could take is faster here: most requests have many rows."""
    num_requests, rows = call.seq_lens.shape[0], call.max_query_len * (call.q.shape[1] // call.key_cache.shape[1])
    if call.max_query_len == 1 or rows <= MAX_ROWS_OF_FEW or 2 * call.q.shape[0] < num_requests * call.max_query_len:
        return False
    if call.q.dtype not in TYPES or call.key_cache.dtype != call.q.dtype:
        return False
    if call.q.shape[2] != HEAD_DIM or call.sliding_window or call.alibi_slopes is not None or call.soft_cap:
        return False
    if call.q.data_ptr() % 16 or call.q.stride(0) % 8 or call.q.stride(1) % 8:
        return False
    return missing(SOURCE, defines(call.q.dtype)) is None


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose a variant of the kernel."""
    return (f"SLIPSTREAM_TYPE={TYPES[dtype]}",)


def variants() -> list[tuple[str, ...]]:
    """All variants, for building ahead of time."""
    return [defines(dtype) for dtype in TYPES]


def verify_attention(call: DecodeCall) -> None:
    """See ops.decode_attention; writes call.out.  One launch."""
    library = load(SOURCE, defines(call.q.dtype))
    launch("verify_attention", library, _params(call), call.q.device)


def _row_tiles(call: DecodeCall) -> int:
    group = call.q.shape[1] // call.key_cache.shape[1]
    return -(-call.max_query_len * group // TILE_ROWS)


def splits_of(units: int, clusters: Mapping[int, int]) -> int:
    """CTAs that share the keys of a tile, as many as there is room for.  clusters: how many run at once, by size."""
    return max((size for size, count in clusters.items() if count >= units), default=SPLITS_OF_MANY)


@lru_cache
def count_clusters(device: torch.device, dtype: torch.dtype) -> dict[int, int]:
    """Clusters that run at once on the device, by their number of CTAs."""
    library = load(SOURCE, defines(dtype))
    with torch.cuda.device(device):
        return {size: int(library.slipstream_count_clusters(size)) for size in SPLITS}


def _params(call: DecodeCall) -> VerifyParams:
    num_kv_heads, block_size = call.key_cache.shape[1:3]
    row_tiles = _row_tiles(call)
    units = call.seq_lens.shape[0] * num_kv_heads * row_tiles
    tensors = {
        "q": call.q, "key_cache": call.key_cache, "value_cache": call.value_cache, "out": call.out,
        "block_tables": call.block_tables, "query_start_loc": call.query_start_loc, "seq_lens": call.seq_lens,
        "tree_mask": call.tree_mask,
    }  # fmt: skip
    return VerifyParams(
        **addresses(tensors),
        q_token_stride=call.q.stride(0),
        q_head_stride=call.q.stride(1),
        table_stride=call.block_tables.stride(0),
        num_requests=call.seq_lens.shape[0],
        num_kv_heads=num_kv_heads,
        group=call.q.shape[1] // num_kv_heads,
        block_size_log2=block_size.bit_length() - 1,
        row_tiles=row_tiles,
        splits=splits_of(units, count_clusters(call.q.device, call.q.dtype)),
        is_dependent=launches_dependently(call.q.device),
        is_prefix_settled=call.is_prefix_settled,
        scale=call.scale,
    )
