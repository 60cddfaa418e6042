"""decode_attention: contract and choice.  Decode and verify rows over a cache of any type."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import MAX_QUERY_LEN, checked_call
from slipstream_kernels.attention.attention_call import AttentionMetadata, AttentionOptions
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.select import select_cuda_or_reference


def decode_attention(
    q: torch.Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend 1 to 64 query tokens of each request to its cached blocks; this step's keys must already be there.

    q: [num_tokens, num_q_heads, head_dim] (a view of a fused qkv is fine).  cache: of q's dtype, or quantised.
    backend: "cuda" (Hopper; ValueError if it cannot run), "reference", "auto": cuda where it can run.
    Returns [num_tokens, num_q_heads, head_dim], dtype of q; rows past query_start_loc[-1] are unspecified.  The cuda
    version rounds 8- and 4-bit caches' queries and probabilities to fp16, and its split of the keys over CTAs follows
    the batch.  Its calls on one device must be ordered, on one stream, with one call before any graph capture.
    Sources: PagedAttention, arXiv:2309.06180; split keys: Flash-Decoding.
    """
    call = checked_call(q, cache, metadata, options, out)
    if metadata.max_query_len > MAX_QUERY_LEN:
        raise ValueError(f"max_query_len: {metadata.max_query_len}, expected 1 to {MAX_QUERY_LEN}")
    version = select_cuda_or_reference(
        "attention.decode_attention", backend, q.is_cuda, lambda cuda: cuda.refusal(call)
    )
    version.decode_attention(call)
    return call.out
