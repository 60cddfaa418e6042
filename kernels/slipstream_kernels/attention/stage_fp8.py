"""stage_fp8: contract and choice.  Copies cached keys and values as e4m3, for prefill attention in FP8."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.attention_call import AttentionMetadata
from slipstream_kernels.kv_cache import FP8_DTYPE, KvCache
from slipstream_kernels.select import require_float, require_shape, select

STAGED_ROWS = 64  # tokens of a staged block


def staged_order(device: torch.device | None = None) -> torch.Tensor:
    """[64] int64: the token, of a staged block, whose values lie at each place.

    Tensor cores give a thread pairs of probabilities of tokens that are eight apart, and take four neighbouring ones of
    e4m3 from it: values of 32 tokens lie in the order in which they meet these.
    """
    place = torch.arange(STAGED_ROWS, device=device)
    within = place % 32
    return place // 32 * 32 + within // 16 * 16 + within % 4 // 2 * 8 + within % 16 // 4 * 2 + within % 2


def stage_fp8(
    cache: KvCache, metadata: AttentionMetadata, key_mean: torch.Tensor | None, *, backend: str = "auto"
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The requests' keys less key_mean and their values, rounded to e4m3, in blocks of 64 tokens in order.

    cache: of float32, bfloat16 or float16 with a key_mean, of float8_e4m3fn without: then values are copied as stored,
    without their heads' scales, and keys are not.
    key_mean: [num_kv_heads, head_dim] fp32, subtracted from every key of a head.  A softmax does not change by it, and
    keys that have a common offset keep more bits.  Numbers beyond e4m3's range become its largest.
    Returns keys [num_requests * ceil(max_seq_len / 64), num_kv_heads, 64, head_dim], or None, and values
    [.., num_kv_heads, head_dim, 64], transposed, with tokens in staged_order: the blocks of a request follow each
    other; tokens past its length are zero up to the end of its last block, and unspecified in blocks past it.
    Source: smoothing of keys: SageAttention, arXiv:2410.02367; here by a fixed mean, so that cached blocks are shared.
    """
    num_kv_heads, _, head_dim = cache.key.shape[1:]
    require_shape("cache.value", cache.value, tuple(cache.key.shape))
    if key_mean is not None:
        require_float("cache.key", cache.key)
        require_shape("key_mean", key_mean, (num_kv_heads, head_dim))
        if key_mean.dtype != torch.float32:
            raise ValueError(f"key_mean: dtype {key_mean.dtype}, expected float32")
    elif cache.dtype != FP8_DTYPE:
        raise ValueError(f"cache.key: dtype {cache.dtype}, expected {FP8_DTYPE} without a key_mean")
    num_blocks = metadata.num_requests * -(-metadata.max_seq_len // STAGED_ROWS)
    device = cache.key.device
    shape = (num_blocks, num_kv_heads, STAGED_ROWS, head_dim)
    keys = None if key_mean is None else torch.empty(shape, dtype=FP8_DTYPE, device=device)
    values = torch.empty((*shape[:2], head_dim, STAGED_ROWS), dtype=FP8_DTYPE, device=device)
    implementation = select("attention.stage_fp8", backend, cache.key)
    implementation.stage_fp8(cache, metadata, key_mean, keys, values)
    return keys, values
