"""Decode attention in CUDA: fills the kernel's arguments and launches it.  Hopper (compute capability 9.0) only.

No device value is read on the host, and the grid and workspace depend on the device alone: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import verify_attention
from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.kv_cache import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE

SOURCE = "sm90_decode_attention.cu"
HEAD_DIMS = (64, 80, 96, 128, 256)
QUERY_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
KV_TYPES = {torch.bfloat16: 0, torch.float16: 0, FP8_DTYPE: 1, INT8_DTYPE: 2, INT4_DTYPE: 3}
MAX_DECODE_REQUESTS = 1024
# Rows of queries that share one pass over the keys; wider heads leave registers for fewer.
MAX_ROWS = 32
MAX_ROWS_WIDE = 16
MAX_CTAS_PER_SM = 3

POINTERS = (
    "q", "key_cache", "value_cache", "out", "key_scale", "value_scale", "block_tables", "query_start_loc", "seq_lens",
    "alibi_slopes", "sinks", "tree_mask", "positions", "partial_out", "partial_state", "arrivals",
)  # fmt: skip
STRIDES = ("q_token_stride", "q_head_stride", "table_stride")
COUNTS = ("num_requests", "num_kv_heads", "group", "block_size_log2", "sliding_window", "num_sms")


class DecodeParams(ctypes.Structure):
    """csrc/params/decode_params.h, field by field."""

    _fields_ = [
        *fields(POINTERS, STRIDES, COUNTS),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("is_dependent", ctypes.c_int32),
        ("is_prefix_settled", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Workspace:
    """What the CTAs of one launch exchange; launches on one device must follow each other (one stream)."""

    num_sms: int
    partial_out: torch.Tensor
    partial_state: torch.Tensor
    arrivals: torch.Tensor


def refusal(call: AttentionCall) -> str | None:
    """Why this version cannot take the call; None if it can."""
    if (reason := hopper_refusal(call.q.device, "q is")) is not None:
        return reason
    if call.q.dtype not in QUERY_TYPES:
        return f"q is {call.q.dtype}, not bfloat16 or float16"
    if call.q.shape[2] not in HEAD_DIMS:
        return f"head_dim {call.q.shape[2]} is not one of {HEAD_DIMS}"
    block_size = call.cache.block_size
    if block_size < 16 or block_size & (block_size - 1):
        return f"block_size {block_size} is not a power of two >= 16"
    if call.metadata.num_requests > MAX_DECODE_REQUESTS:
        return f"{call.metadata.num_requests} requests are more than {MAX_DECODE_REQUESTS}"
    return build_refusal(SOURCE, defines(call.q.dtype, call.cache.dtype, call.q.shape[2]))


def decode_attention(call: AttentionCall) -> None:
    """See ops.decode_attention; writes call.out.  One launch."""
    if call.q.shape[0] == 0:
        return
    if verify_attention.takes(call):
        verify_attention.verify_attention(call)
        return
    library = load(SOURCE, defines(call.q.dtype, call.cache.dtype, call.q.shape[2]))
    params = _params(call, workspace(call.q.device))
    launch("decode_attention", library, params, call.q.device)


def defines(query: torch.dtype, cache: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """The macros that choose a variant of the kernel."""
    return (
        f"SLIPSTREAM_QUERY={QUERY_TYPES[query]}",
        f"SLIPSTREAM_KV={KV_TYPES[cache]}",
        f"SLIPSTREAM_HEAD_DIM={head_dim}",
    )


def variants() -> list[tuple[str, ...]]:
    """All variants, for building ahead of time."""
    caches = (FP8_DTYPE, INT8_DTYPE, INT4_DTYPE)
    return [defines(q, cache, dim) for q in QUERY_TYPES for cache in (q, *caches) for dim in HEAD_DIMS]


@lru_cache
def workspace(device: torch.device) -> Workspace:
    """The device's workspace, made on first use: run a step before capturing CUDA graphs."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("decode_attention: first use on this device lies inside a graph capture; run it once before")
    num_sms = count_sms(device)
    # A CTA leaves at most two parts: of the unit that came to it from another, and of the one that it hands on. Three
    # CTAs of an SM have fewer rows in all than two with the most.
    rows = 2 * 2 * num_sms * MAX_ROWS
    return Workspace(
        num_sms=num_sms,
        partial_out=torch.empty(rows * 128, dtype=torch.float32, device=device),
        partial_state=torch.empty(rows * 2, dtype=torch.float32, device=device),
        arrivals=torch.zeros(MAX_CTAS_PER_SM * num_sms, dtype=torch.int32, device=device),
    )


def _params(call: AttentionCall, space: Workspace) -> DecodeParams:
    cache, metadata, options = call.cache, call.metadata, call.options
    num_kv_heads, block_size = cache.key.shape[1:3]
    group = call.q.shape[1] // num_kv_heads
    tensors = {
        "q": call.q, "key_cache": cache.key, "value_cache": cache.value, "out": call.out,
        "key_scale": cache.key_scale, "value_scale": cache.value_scale, "block_tables": metadata.block_tables,
        "query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens,
        "alibi_slopes": options.alibi_slopes, "sinks": options.sinks, "tree_mask": metadata.tree_mask,
        "positions": metadata.positions,
        "partial_out": space.partial_out, "partial_state": space.partial_state, "arrivals": space.arrivals,
    }  # fmt: skip
    return DecodeParams(
        **addresses(tensors),
        q_token_stride=call.q.stride(0),
        q_head_stride=call.q.stride(1),
        table_stride=metadata.block_tables.stride(0),
        num_requests=metadata.num_requests,
        num_kv_heads=num_kv_heads,
        group=group,
        block_size_log2=block_size.bit_length() - 1,
        sliding_window=options.sliding_window or 0,
        num_sms=space.num_sms,
        scale=options.scale,
        soft_cap=options.soft_cap or 0.0,
        is_dependent=launches_dependently(call.q.device),
        is_prefix_settled=metadata.is_prefix_settled,
        rows=_rows(metadata.max_query_len * group, call.q.shape[2]),
    )


def _rows(num_rows: int, head_dim: int) -> int:
    largest = MAX_ROWS if head_dim <= 128 else MAX_ROWS_WIDE
    return next(rows for rows in (8, 16, 24, 32) if rows >= num_rows or rows == largest)
