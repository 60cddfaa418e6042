"""paged_attention: contract and choice.  Prefill, decode and mixed steps in one variable-length call."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import check_options, check_tensors
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.kv_cache import INT4_DTYPE, KvCache
from slipstream_kernels.select import require_float, require_shape, select, select_cuda

TRITON_HEAD_DIMS = (64, 80, 96, 128, 256)
# Calls of longer queries than decode and draft rows go to the CUDA kernel, where it can run.
SHORT_QUERY_LEN = 16
# Of heads whose queries may be rounded to e4m3: a row of 128 bytes is what the tensor cores' operands are swizzled by.
FP8_QUERY_HEAD_DIM = 128


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_kv_splits: int | None = None,
    fp8_queries: bool = False,
    fp8_probs: bool = False,
    key_mean: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached blocks; this step's keys must already be in the cache.

    q: [num_tokens, num_q_heads, head_dim] (a view of a fused qkv is fine).
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim] of q's dtype, float8_e4m3fn or int8, or
    int4 as uint8 with head_dim / 2 bytes; key_scale, value_scale and the formats: kv_cache.py.
    block_tables: [num_requests, max_blocks] int32, -1 pads.  query_start_loc: [num_requests + 1] int32, starts at 0.
    seq_lens: [num_requests] int32, cached tokens including this step's; 0 marks a padding request, whose rows become
    zero. Query i of a request sits at position seq_len - query_len + i and sees key positions <= its own; with
    sliding_window w only those with position_q - position_k < w.  alibi_slopes: [num_q_heads] fp32, adds slope *
    (position_k - position_q).
    soft_cap c: scores become c * tanh(score / c).  sinks: [num_q_heads] fp32, a score of each head that takes part in
    the softmax without a value.  scale > 0 multiplies q.k (usually 1/sqrt(head_dim)).
    max_query_len, max_seq_len: host-side upper bounds that size grids (no device read, CUDA-graph safe); max_seq_len
    defaults to what block_tables can hold.  num_kv_splits fixes the triton decode kernel's split of the keys, which
    otherwise follows the batch size (its rounding too); the reference ignores it.
    fp8_queries: of long prompts over an fp8 cache, queries may be rounded to e4m3 (per token and head), so that their
    product with keys runs at the tensor cores' double rate; cost: docs/measurements.  Only the cuda version does.
    fp8_probs: with fp8_queries, so may be probabilities, relative to their row's largest, so that both products do; not
    with soft_cap or alibi_slopes.
    key_mean: [num_kv_heads, head_dim] fp32, over a 16-bit or fp32 cache: queries, probabilities and values of long
    prompts may be rounded, and keys less this mean (stage_fp8).  The reference rounds those of all queries of more than
    16 tokens, cuda those of prompts that are worth a copy of their keys, triton none.  Not with soft_cap or sinks,
    which a mean changes, nor with alibi_slopes.
    backend: "cuda" (Hopper; ValueError if it cannot run), "triton", "reference"; "auto": cuda for queries of more than
    16 tokens where it can run, else triton.  Calls of the cuda version on one device must be ordered, on one stream.
    Returns [num_tokens, num_q_heads, head_dim], dtype of q; rows past query_start_loc[-1] are unspecified.
    Sources: PagedAttention, arXiv:2309.06180; split keys merged by log-sum-exp: Flash-Decoding; ALiBi:
    arXiv:2108.12409; FlashAttention-3: arXiv:2407.08608.
    """
    cache = KvCache(key_cache, value_cache, key_scale, value_scale)
    check_tensors(q, cache, block_tables, query_start_loc, seq_lens)
    check_options(q, sliding_window, alibi_slopes, soft_cap, sinks, out)
    if max_query_len < 1:
        raise ValueError(f"max_query_len: {max_query_len}, expected at least 1")
    if num_kv_splits is not None and num_kv_splits < 1:
        raise ValueError(f"num_kv_splits: {num_kv_splits}, expected at least 1, or None")
    if key_mean is not None:
        _check_key_mean(key_mean, key_cache, soft_cap, sinks, alibi_slopes)
    call = AttentionCall(
        q=q,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        out=torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len or block_tables.shape[1] * key_cache.shape[2],
        scale=scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        num_kv_splits=num_kv_splits,
        key_scale=key_scale,
        value_scale=value_scale,
        fp8_queries=fp8_queries,
        fp8_probs=fp8_probs,
        key_mean=key_mean,
        sinks=sinks,
    )
    _run(call, backend)
    return call.out


def _check_key_mean(
    key_mean: torch.Tensor,
    key_cache: torch.Tensor,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> None:
    require_float("key_cache", key_cache)
    require_shape("key_mean", key_mean, (key_cache.shape[1], key_cache.shape[3]))
    if soft_cap is not None or sinks is not None:
        raise ValueError("key_mean: soft_cap and sinks change when a mean is subtracted from all keys")
    if alibi_slopes is not None:
        raise ValueError("key_mean: attention in FP8 has no alibi_slopes")


def _run(call: AttentionCall, backend: str) -> None:
    is_long = call.q.is_cuda and call.max_query_len > SHORT_QUERY_LEN
    version = select_cuda(
        "attention.paged_attention", "attention.prefill_attention", backend, is_long, lambda cuda: cuda.refusal(call)
    )
    if version is None:
        version = select("attention.paged_attention", backend, call.q, triton_refusal(call.q, call.key_cache))
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
