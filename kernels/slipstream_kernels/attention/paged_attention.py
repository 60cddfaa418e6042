"""paged_attention: contract and choice.  Prefill, decode and mixed steps in one variable-length call."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import checked_call
from slipstream_kernels.attention.attention_call import AttentionCall, AttentionMetadata, AttentionOptions
from slipstream_kernels.kv_cache import INT4_DTYPE, KvCache
from slipstream_kernels.select import require_float, require_shape, select, select_cuda

TRITON_HEAD_DIMS = (64, 80, 96, 128, 256)
# Calls of longer queries than decode and draft rows go to the CUDA kernel, where it can run.
SHORT_QUERY_LEN = 16
# Heads of this size may have queries rounded to e4m3: tensor core operands are swizzled in rows of 128 bytes.
FP8_QUERY_HEAD_DIM = 128


def paged_attention(
    q: torch.Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached blocks; this step's keys must already be in the cache.

    q: [num_tokens, num_q_heads, head_dim] (a view of a fused qkv is fine).  cache: of q's dtype, or quantised.
    metadata: without tree_mask.
    backend: "cuda" (Hopper; ValueError if it cannot run), "triton", "reference"; "auto": cuda for queries of more than
    16 tokens where it can run, else triton.  Calls of the cuda version on one device must be ordered, on one stream.
    Returns [num_tokens, num_q_heads, head_dim], dtype of q; rows past query_start_loc[-1] are unspecified.
    Sources: PagedAttention, arXiv:2309.06180; split keys merged by log-sum-exp: Flash-Decoding; FlashAttention-3:
    arXiv:2407.08608.
    """
    call = checked_call(q, cache, metadata, options, out)
    if metadata.tree_mask is not None:
        raise ValueError("tree_mask: paged_attention knows no trees; decode_attention and invariant_attention do")
    if options.num_kv_splits is not None and options.num_kv_splits < 1:
        raise ValueError(f"num_kv_splits: {options.num_kv_splits}, expected at least 1, or None")
    if options.key_mean is not None:
        _check_key_mean(options.key_mean, cache.key, options)
    _run(call, backend)
    return call.out


def _check_key_mean(key_mean: torch.Tensor, key_cache: torch.Tensor, options: AttentionOptions) -> None:
    require_float("cache.key", key_cache)
    require_shape("key_mean", key_mean, (key_cache.shape[1], key_cache.shape[3]))
    if options.soft_cap is not None or options.sinks is not None:
        raise ValueError("key_mean: soft_cap and sinks change when a mean is subtracted from all keys")
    if options.alibi_slopes is not None:
        raise ValueError("key_mean: attention in FP8 has no alibi_slopes")


def _run(call: AttentionCall, backend: str) -> None:
    is_long = call.q.is_cuda and call.metadata.max_query_len > SHORT_QUERY_LEN
    version = select_cuda(
        "attention.paged_attention", "attention.prefill_attention", backend, is_long, lambda cuda: cuda.refusal(call)
    )
    if version is None:
        version = select("attention.paged_attention", backend, call.q, triton_refusal(call.q, call.cache.key))
    version.paged_attention(call)


def triton_min_block_size(kv_dtype: torch.dtype | None) -> int:
    """Tokens of the smallest tile of keys, which lies within one block.

    Of int4 Triton-lang (3.6) keeps 8 neighbouring tokens to a thread, four threads to a product: with 16 tokens the
    product of probabilities and values is wrong.
    """
    return 32 if kv_dtype == INT4_DTYPE else 16


def triton_refusal(q: torch.Tensor, key_cache: torch.Tensor) -> str | None:
    """Why attention in Triton-lang cannot take these; None if it can."""
    if q.shape[2] not in TRITON_HEAD_DIMS:
        return f"head_dim {q.shape[2]} is not one of {TRITON_HEAD_DIMS}"
    block_size, smallest = key_cache.shape[2], triton_min_block_size(key_cache.dtype)
    if block_size < smallest or block_size & (block_size - 1):
        return f"block_size {block_size} is not a power of two >= {smallest}"
    return None
