"""Prefill attention in CUDA: fills the kernel's arguments and launches it.  Hopper (compute capability 9.0) only.

No device value is read on the host: work is found on the device, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache

import torch

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import prefill_stage
from slipstream_kernels.attention.paged_attention import FP8_QUERY_HEAD_DIM
from slipstream_kernels.attention.stage_fp8 import stage_fp8
from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.kv_cache import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE, TOKEN_SCALED_DTYPES

SOURCE = "sm90_prefill_attention.cu"
HEAD_DIMS = (64, 80, 96, 128, 256)
# PrefillKv of csrc/schedule/prefill_shape.cuh: caches of these types; copies of their blocks; keys of an fp8 cache;
# both products in e4m3.
KV_TYPES = {torch.bfloat16: 0, torch.float16: 0, FP8_DTYPE: 1, INT8_DTYPE: 2, INT4_DTYPE: 3}
STAGED, FP8_KEYS, ALL_FP8 = 4, 5, 6
TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# Head dim, whether it has a soft cap (Gemma 2), whether ALiBi (Baichuan 13B).
OPTIONS_OF_MODELS = ((128, True, False), (256, True, False), (128, False, True))
# Keys and values that may be in use at once, of the L2 cache's 50 to 60 MB.
SECTION_BYTES = 32 << 20
# Keys may be split where sequences may be so long; into how many parts, the device decides by the step's tiles
# (csrc/schedule/prefill_splits.cuh), which are at most so many for each SM.  A tile has 64 rows in 4 warps.
MIN_SPLIT_LEN, PARTS_PER_SM = 4096, 2
WARPS_OF_TILE = {dim: 12 if dim == 64 else 8 for dim in HEAD_DIMS}

POINTERS = (
    "q", "key_cache", "value_cache", "key_scale", "value_scale", "out", "block_tables", "query_start_loc", "seq_lens",
    "alibi_slopes", "sinks", "counters", "parts",
)  # fmt: skip
STRIDES = ("q_token_stride", "q_head_stride", "table_stride", "num_blocks")
COUNTS = (
    "num_tokens", "num_requests", "num_q_heads", "num_kv_heads", "block_size_log2", "heads_per_section",
    "sliding_window", "num_sms",
)  # fmt: skip


class PrefillParams(ctypes.Structure):
    """csrc/params/prefill_params.h, field by field."""

    _fields_ = [
        *fields(POINTERS, STRIDES, COUNTS),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("staged_blocks", ctypes.c_int32),
        ("pack_log2", ctypes.c_int32),
    ]


def refusal(call: AttentionCall) -> str | None:
    """Why this version cannot take the call; None if it can."""
    q = call.q
    if (reason := hopper_refusal(q.device, "q is")) is not None:
        return reason
    if q.dtype not in TYPES:
        return f"q is {q.dtype}, not bfloat16 or float16"
    if q.shape[2] not in HEAD_DIMS:
        return f"head_dim {q.shape[2]} is not one of {HEAD_DIMS}"
    block_size = call.cache.block_size
    if block_size < 16 or block_size & (block_size - 1):
        return f"block_size {block_size} is not a power of two >= 16"
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        return "q's heads do not begin at multiples of 16 bytes"
    if any(tensor.data_ptr() % 16 for tensor in _copied(call)):
        return "the cache does not begin at a multiple of 16 bytes"
    source = source_of_keys_and_values(call)
    if not has_whole_rows(source, q.shape[2]):
        return f"rows of int4 with {q.shape[2]} features do not begin at multiples of 16 bytes"
    is_staged = source in _STAGERS
    return build_refusal(SOURCE, defines(call)) or (build_refusal(prefill_stage.SOURCE, ()) if is_staged else None)


def _copied(call: AttentionCall) -> list[torch.Tensor]:
    """What the copy engine reads besides q."""
    return list(call.cache.block_tensors)


def paged_attention(call: AttentionCall) -> None:
    """See ops.paged_attention; writes call.out.  One launch, or two where the cache's blocks are staged first."""
    if call.q.shape[0] == 0 or call.metadata.num_requests == 0:
        return
    kv = source_of_keys_and_values(call)
    library = load(SOURCE, defines(call))
    staged: prefill_stage.Staged | None
    if kv == ALL_FP8:
        call, staged = in_fp8(call)
    else:
        staged = _STAGERS[kv](call) if kv in _STAGERS else None
    device = call.q.device
    params = arguments(call, staged, count_sms(device), work_counters(device))
    launch("prefill_attention", library, params, device)


def in_fp8(call: AttentionCall) -> tuple[AttentionCall, prefill_stage.Staged]:
    """The call over copies of its blocks: values as they are staged, keys of a 16-bit cache as one of e4m3 in order."""
    keys, values = stage_fp8(call.cache, call.metadata, call.options.key_mean)
    num_requests = call.metadata.num_requests
    staged = prefill_stage.Staged(None, values, values.shape[0] // num_requests)
    if keys is None:
        return call, staged
    tables = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device).view(num_requests, -1)
    metadata = replace(call.metadata, block_tables=tables)
    return replace(call, cache=replace(call.cache, key=keys), metadata=metadata), staged


_STAGERS = {STAGED: prefill_stage.stage_both, FP8_KEYS: prefill_stage.stage_values}


def source_of_keys_and_values(call: AttentionCall) -> int:
    """PrefillKv of a call."""
    options, fits_rows = call.options, call.q.shape[2] == FP8_QUERY_HEAD_DIM
    may_round = options.fp8_queries and call.cache.dtype == FP8_DTYPE and fits_rows
    is_plain = options.soft_cap is None and options.alibi_slopes is None
    is_all = options.key_mean is not None or (may_round and options.fp8_probs)
    if is_all and is_plain and fits_rows and prefill_stage.pays_in_fp8(call):
        return ALL_FP8
    if may_round and prefill_stage.pays(call, with_keys=False):
        return FP8_KEYS
    return STAGED if prefill_stage.pays(call, with_keys=True) else KV_TYPES[call.cache.dtype]


def defines(call: AttentionCall) -> tuple[str, ...]:
    """The macros that choose the variant of the kernel for a call."""
    has_soft_cap, has_alibi = call.options.soft_cap is not None, call.options.alibi_slopes is not None
    return variant(call.q.dtype, source_of_keys_and_values(call), call.q.shape[2], has_soft_cap, has_alibi)


def variant(
    query: torch.dtype, kv: int, head_dim: int, has_soft_cap: bool = False, has_alibi: bool = False
) -> tuple[str, ...]:
    """The macros of one variant of the kernel.  kv: PrefillKv."""
    return (
        f"SLIPSTREAM_TYPE={TYPES[query]}",
        f"SLIPSTREAM_KV={kv}",
        f"SLIPSTREAM_HEAD_DIM={head_dim}",
        f"SLIPSTREAM_SOFT_CAP={int(has_soft_cap)}",
        f"SLIPSTREAM_ALIBI={int(has_alibi)}",
    )


def variants() -> list[tuple[str, ...]]:
    """Those worth building ahead of time: of all types and head dims, and the soft cap and ALiBi of known models."""
    caches = (*sorted(set(KV_TYPES.values())), STAGED)
    kinds = [(kv, dim) for kv in caches for dim in HEAD_DIMS if has_whole_rows(kv, dim)]
    in_fp8 = [(kv, FP8_QUERY_HEAD_DIM) for kv in (FP8_KEYS, ALL_FP8)]
    plain = [variant(query, *kind) for query in TYPES for kind in (*kinds, *in_fp8)]
    with_options = [
        variant(torch.bfloat16, kv, dim, has_soft_cap, has_alibi)
        for dim, has_soft_cap, has_alibi in OPTIONS_OF_MODELS
        for kv in (0, KV_TYPES[FP8_DTYPE], STAGED)
    ]
    return plain + with_options


def has_whole_rows(kv: int, head_dim: int) -> bool:
    """Whether the copy engine can read rows of that source: they begin at multiples of 16 bytes.  kv: PrefillKv."""
    return kv != KV_TYPES[INT4_DTYPE] or head_dim % 32 == 0


@lru_cache
def work_counters(device: torch.device) -> torch.Tensor:
    """The device's counters of work and of splits, made on first use: run a step before capturing CUDA graphs."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("prefill_attention: first use here lies inside a graph capture; run it once before")
    num_split_warps = PARTS_PER_SM * count_sms(device) * max(WARPS_OF_TILE.values())
    return torch.zeros(2 + num_split_warps, dtype=torch.int32, device=device)


def _parts(call: AttentionCall, num_sms: int) -> torch.Tensor | None:
    """Room for what the CTAs that share keys leave for each other: 68 numbers of a thread at head_dim 128."""
    if call.metadata.max_seq_len < MIN_SPLIT_LEN:
        return None
    num_bytes = parts_bytes(num_sms, call.q.shape[2])
    return torch.empty(num_bytes // 4, dtype=torch.float32, device=call.q.device)


def parts_bytes(num_sms: int, head_dim: int) -> int:
    """What a call over long sequences allocates for them; 0 for another head_dim, which is not served."""
    tile_dim = -(-head_dim // 64) * 64
    return PARTS_PER_SM * num_sms * WARPS_OF_TILE.get(head_dim, 0) * 32 * (tile_dim // 2 + 4) * 4


def arguments(
    call: AttentionCall, staged: prefill_stage.Staged | None, num_sms: int, counters: torch.Tensor
) -> PrefillParams:
    """What a launch of num_sms CTAs takes.  counters: as work_counters makes them."""
    cache, metadata, options, num_q_heads = call.cache, call.metadata, call.options, call.q.shape[1]
    num_blocks, num_kv_heads, block_size, _ = cache.key.shape
    group = num_q_heads // num_kv_heads
    pack_log2 = min((group & -group).bit_length() - 1, 6)
    key_cache, value_cache, key_scale, value_scale = cache.key, cache.value, cache.key_scale, cache.value_scale
    if staged is not None:
        key_cache, value_cache = key_cache if staged.keys is None else staged.keys, staged.values
        if cache.dtype in TOKEN_SCALED_DTYPES:
            key_scale = value_scale = None  # in what is staged
    tensors = {
        "q": call.q, "key_cache": key_cache, "value_cache": value_cache, "key_scale": key_scale,
        "value_scale": value_scale, "out": call.out, "block_tables": metadata.block_tables,
        "query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens,
        "alibi_slopes": options.alibi_slopes, "sinks": options.sinks, "counters": counters,
        "parts": _parts(call, num_sms),
    }  # fmt: skip
    return PrefillParams(
        **addresses(tensors),
        q_token_stride=call.q.stride(0),
        q_head_stride=call.q.stride(1),
        table_stride=metadata.block_tables.stride(0),
        num_blocks=num_blocks,
        num_tokens=call.q.shape[0],
        num_requests=metadata.num_requests,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        block_size_log2=block_size.bit_length() - 1,
        heads_per_section=_heads_per_section(call, key_cache, value_cache) * (group >> pack_log2),
        sliding_window=options.sliding_window or 0,
        num_sms=num_sms,
        scale=options.scale,
        soft_cap=options.soft_cap or 0.0,
        staged_blocks=0 if staged is None else staged.num_blocks,
        pack_log2=pack_log2,
    )


def _heads_per_section(call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> int:
    """How many kv heads of the longest sequence the L2 cache holds, as keys and values of these types."""
    num_kv_heads, head_dim = call.cache.num_kv_heads, call.q.shape[2]
    bytes_of_head = call.metadata.max_seq_len * head_dim * (keys.element_size() + values.element_size())
    return max(1, min(num_kv_heads, SECTION_BYTES // bytes_of_head))
