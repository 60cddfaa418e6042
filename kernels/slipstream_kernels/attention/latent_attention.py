"""latent_attention: contract and choice.  Absorbed queries of MLA over the paged cache of latents."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import check_requests, check_rows
from slipstream_kernels.attention.attention_call import AttentionMetadata
from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.latent_cache import LatentCache, check_latent_cache
from slipstream_kernels.select import require_float, require_shape, select, select_cuda

OP = "attention.latent_attention"
# "auto" leaves these rows (tokens x heads) over such contexts to Triton-lang: measured on one H200, one token of 16
# heads takes it 22 us over 8k (CUDA 27), 113 over 128k (75). Other calls take CUDA 0.4 to 1.1 times as long, and those
# of FP8 rows 0.2 to 0.7 times, these few too.
FEW_ROWS, SHORT_SEQ_LEN = 16, 1 << 15


def latent_attention(
    q: torch.Tensor,
    cache: LatentCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached latents; this step's latents must already be there.

    q: [num_tokens, num_heads, rank + rope_dim], contiguous: W_UK^T q_nope, then the rotated part, so that a score is
    the product with a cache row and values are its first `rank` features.  scale multiplies scores.
    metadata: positions of a tree's rows are not needed.
    backend: "cuda" (Hopper; bf16 q, rows of 512 + 64 features in bf16 or FP8, at most 64 tokens a request; ValueError
    if it cannot run), "triton", "reference" or "auto".
    Returns [num_tokens, num_heads, rank], dtype of q; rows past query_start_loc[-1] are unspecified.  The triton
    and cuda versions split the keys over programs by the batch.  Calls of the cuda version on one device must be
    ordered, on one stream, with one call before any graph capture.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 (absorbed projections); split keys: Flash-Decoding.
    """
    call = checked_latent_call(q, cache, metadata, scale, out)
    version = select_cuda(OP, OP, backend, q.is_cuda and prefers_cuda(call), lambda cuda: cuda.refusal(call))
    (version or select(OP, backend, q)).latent_attention(call)
    return call.out


def checked_latent_call(
    q: torch.Tensor, cache: LatentCache, metadata: AttentionMetadata, scale: float, out: torch.Tensor | None
) -> LatentCall:
    """The call, with room for its result if there is none.  Raises ValueError, naming the field, for what is wrong."""
    require_float("q", q)
    check_latent_cache(cache, q.dtype)
    num_tokens, num_heads = q.shape[:2]
    require_shape("q", q, (num_tokens, num_heads, cache.rank + cache.rope_dim))
    if not q.is_contiguous():
        raise ValueError("q: must be contiguous")
    check_requests(metadata)
    check_rows(q, metadata)
    if out is None:
        out = torch.empty(num_tokens, num_heads, cache.rank, dtype=q.dtype, device=q.device)
    require_shape("out", out, (num_tokens, num_heads, cache.rank))
    if out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out: must be contiguous and {q.dtype}")
    return LatentCall(q, cache, metadata, scale, out)


def prefers_cuda(call: LatentCall) -> bool:
    """Whether "auto" chooses the CUDA version where it can run; by bounds of the host, which graphs have too."""
    is_few = call.q.shape[0] * call.q.shape[1] <= FEW_ROWS and call.metadata.max_seq_len <= SHORT_SEQ_LEN
    return call.cache.is_fp8 or not is_few
