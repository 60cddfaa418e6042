"""Stages blocks of quantised caches as fp16 for prefill attention: when that pays, and the launch that does it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.kv_cache import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE, TOKEN_SCALED_DTYPES

SOURCE = "sm90_prefill_stage.cu"
STAGED_ROWS = 64
KV_TYPES = {FP8_DTYPE: 1, INT8_DTYPE: 2, INT4_DTYPE: 3}
# Query tokens of a request, on average, from which a copy of its blocks is worth a launch: about 20 us for 32k tokens
# of 8 heads, of which the faster kernel wins back a fifth of its time.
MIN_QUERY_LEN = 1536
# Tokens of the longest request from which both products in FP8 are faster than the first one alone: 2,048 are 0.94
# times as fast, 4,096 1.1 times (bench_prefill).
MIN_FP8_SEQ_LEN = 4096
# Bytes of the copies over those of q: the memory plan counts twice as much for what comes after attention.
MAX_RATIO = 12

POINTERS = ("key_cache", "value_cache", "key_scale", "value_scale", "keys", "values", "block_tables", "seq_lens")
COUNTS = ("num_requests", "staged_blocks", "num_kv_heads", "head_dim", "block_size_log2", "kv_type")


class PrefillStageParams(ctypes.Structure):
    """csrc/params/prefill_stage_params.h, field by field."""

    _fields_ = fields(POINTERS, ("table_stride",), COUNTS)


@dataclass(frozen=True)
class Staged:
    """keys, values: fp16 [num_requests, num_blocks, num_kv_heads, 64, head_dim]; keys None: not wanted."""

    keys: torch.Tensor | None
    values: torch.Tensor
    num_blocks: int


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [()]


def pays(call: AttentionCall, with_keys: bool) -> bool:
    """Whether the call's queries are so many that its blocks should be staged."""
    if call.cache.dtype not in KV_TYPES or call.q.shape[0] < MIN_QUERY_LEN * call.metadata.num_requests:
        return False
    return _fits(call, 2 if with_keys else 1)


def pays_in_fp8(call: AttentionCall) -> bool:
    """Whether values should be staged as e4m3, and keys of a 16-bit cache, too."""
    is_long = call.q.shape[0] >= MIN_QUERY_LEN * call.metadata.num_requests
    is_worth_it = is_long and call.metadata.max_seq_len >= MIN_FP8_SEQ_LEN
    return is_worth_it and _fits(call, 0.5 if call.cache.dtype == FP8_DTYPE else 1)


def _fits(call: AttentionCall, num_copies: float) -> bool:
    """num_copies: of a cache of fp16."""
    rows = call.metadata.num_requests * call.metadata.max_seq_len * call.cache.num_kv_heads
    return num_copies * rows <= MAX_RATIO * call.q.shape[0] * call.q.shape[1]


def stage_both(call: AttentionCall) -> Staged:
    """Launch the copy of keys and values.  fp8: without its heads' scales, here and below."""
    keys, values = torch.empty((2, *_shape(call)), dtype=torch.float16, device=call.q.device)
    return _launch(call, Staged(keys, values, keys.shape[1]))


def stage_values(call: AttentionCall) -> Staged:
    """Launch the copy of the values."""
    values = torch.empty(_shape(call), dtype=torch.float16, device=call.q.device)
    return _launch(call, Staged(None, values, values.shape[1]))


def _shape(call: AttentionCall) -> tuple[int, ...]:
    num_blocks = -(-call.metadata.max_seq_len // STAGED_ROWS)
    return (call.metadata.num_requests, num_blocks, call.cache.num_kv_heads, STAGED_ROWS, call.q.shape[2])


def _launch(call: AttentionCall, staged: Staged) -> Staged:
    cache, metadata = call.cache, call.metadata
    num_kv_heads, block_size = cache.key.shape[1:3]
    has_scales = cache.dtype in TOKEN_SCALED_DTYPES
    tensors = {
        "key_cache": cache.key, "value_cache": cache.value,
        "key_scale": cache.key_scale if has_scales else None, "value_scale": cache.value_scale if has_scales else None,
        "keys": staged.keys, "values": staged.values, "block_tables": metadata.block_tables,
        "seq_lens": metadata.seq_lens,
    }  # fmt: skip
    params = PrefillStageParams(
        **addresses(tensors),
        table_stride=metadata.block_tables.stride(0),
        num_requests=metadata.num_requests,
        staged_blocks=staged.num_blocks,
        num_kv_heads=num_kv_heads,
        head_dim=call.q.shape[2],
        block_size_log2=block_size.bit_length() - 1,
        kv_type=KV_TYPES[cache.dtype],
    )
    library = load(SOURCE, ())
    launch("prefill_stage", library, params, call.q.device)
    return staged
