"""stage_fp8_keys: contract and choice.  Copies cached keys as e4m3 and values as fp16, for prefill attention in FP8."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_float, require_shape, select

STAGED_ROWS = 64  # tokens of a staged block


def stage_fp8_keys(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key_mean: torch.Tensor,
    *,
    max_seq_len: int,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The requests' keys less key_mean, rounded to e4m3, and their values as fp16, in the order of their tokens.

    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim] of float32, bfloat16 or float16.
    block_tables: [num_requests, max_blocks] int32.  seq_lens: [num_requests] int32, at most max_seq_len.
    key_mean: [num_kv_heads, head_dim] fp32, subtracted from every key of a head.  A softmax does not change by it, and
    keys that have a common offset keep more bits.  Values beyond the types' ranges become their largest.
    Returns keys and values, both [num_requests * ceil(max_seq_len / 64), num_kv_heads, 64, head_dim]: the blocks of a
    request follow each other; rows past its length are unspecified up to its last block of 64, blocks past it, too.
    Source: smoothing of keys: SageAttention, arXiv:2410.02367; here by a fixed mean, so that cached blocks are shared.
    """
    require_float("key_cache", key_cache)
    require_shape("value_cache", value_cache, tuple(key_cache.shape))
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    require_shape("key_mean", key_mean, (num_kv_heads, head_dim))
    if key_mean.dtype != torch.float32:
        raise ValueError(f"key_mean: dtype {key_mean.dtype}, expected float32")
    num_blocks = -(-max_seq_len // STAGED_ROWS)
    shape = (seq_lens.shape[0] * num_blocks, num_kv_heads, STAGED_ROWS, head_dim)
    keys = torch.empty(shape, dtype=torch.float8_e4m3fn, device=key_cache.device)
    values = torch.empty(shape, dtype=torch.float16, device=key_cache.device)
    implementation = select("attention.stage_fp8_keys", backend, key_cache)
    implementation.stage_fp8_keys(key_cache, value_cache, block_tables, seq_lens, key_mean, keys, values)
    return keys, values
