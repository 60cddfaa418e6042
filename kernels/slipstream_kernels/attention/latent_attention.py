"""latent_attention: contract and choice.  Absorbed queries of MLA over the paged cache of latents."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import check_requests
from slipstream_kernels.attention.decode_attention import check_rows
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
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    is_prefix_settled: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached latents; this step's latents must already be there.

    q: [num_tokens, num_heads, rank + rope_dim], contiguous: W_UK^T q_nope, then the rotated part, so that a score is
    the product with a cache row and values are its first `rank` features.
    block_tables: [num_requests, max_blocks] int32, -1 pads.  query_start_loc: [num_requests + 1] int32, starts at 0.
    seq_lens: [num_requests] int32, cached tokens including this step's; 0 marks a padding request, whose rows become
    zero.  Row i of a request is slot seq_len - query_len + i and sees slots up to its own.
    tree_mask: [num_tokens] int64, as ops.decode_attention takes it; then queries have at most 64 tokens.
    max_query_len, max_seq_len: host-side upper bounds that size grids (no device read, CUDA-graph safe).
    is_prefix_settled: as ops.decode_attention takes it.
    backend: "cuda" (Hopper; bf16 q, rows of 512 + 64 features in bf16 or FP8, at most 64 tokens a request; ValueError
    if it cannot run), "triton", "reference" or "auto".
    Returns [num_tokens, num_heads, rank], dtype of q; rows past query_start_loc[-1] are unspecified.  The triton
    and cuda versions split the keys over programs by the batch.  Calls of the cuda version on one device must be
    ordered, on one stream, with one call before any graph capture.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 (absorbed projections); split keys: Flash-Decoding.
    """
    out = empty_latents(q, cache) if out is None else out
    call = LatentCall(
        q, cache, block_tables, query_start_loc, seq_lens, tree_mask, out, max_query_len, max_seq_len, scale,
        is_prefix_settled,
    )  # fmt: skip
    check_call(call)
    version = select_cuda(OP, OP, backend, q.is_cuda and prefers_cuda(call), lambda cuda: cuda.refusal(call))
    (version or select(OP, backend, q)).latent_attention(call)
    return out


def empty_latents(q: torch.Tensor, cache: LatentCache) -> torch.Tensor:
    """Room for the result of attention over latents."""
    return torch.empty((*q.shape[:2], cache.rank), dtype=q.dtype, device=q.device)


def check_call(call: LatentCall) -> None:
    """Raise ValueError for tensors that do not fit each other."""
    q, cache, out = call.q, call.cache, call.out
    require_float("q", q)
    check_latent_cache(cache, q.dtype)
    num_tokens, num_heads = q.shape[:2]
    require_shape("q", q, (num_tokens, num_heads, cache.rank + cache.rope_dim))
    check_requests(call.block_tables, call.query_start_loc, call.seq_lens)
    if call.tree_mask is not None:
        check_rows(q, call.max_query_len, call.tree_mask, call.positions)
    if call.max_query_len < 1 or not q.is_contiguous():
        raise ValueError(f"max_query_len: {call.max_query_len}, expected at least 1, and contiguous q")
    require_shape("out", out, (num_tokens, num_heads, cache.rank))
    if out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out: must be contiguous and {q.dtype}")


def prefers_cuda(call: LatentCall) -> bool:
    """Whether "auto" chooses the CUDA version where it can run; by bounds of the host, which graphs have too."""
    is_few = call.q.shape[0] * call.q.shape[1] <= FEW_ROWS and call.max_seq_len <= SHORT_SEQ_LEN
    return call.cache.is_fp8 or not is_few
