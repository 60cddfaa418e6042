"""decode_attention: contract and choice.  Decode and verify rows over a cache of any type."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import check_options, check_tensors
from slipstream_kernels.attention.decode_call import DecodeCall
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.select import require_shape, select_cuda_or_reference

MAX_QUERY_LEN = 64


def decode_attention(
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
    tree_mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    is_prefix_settled: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend 1 to 64 query tokens of each request to its cached blocks; this step's keys must already be there.

    q: [num_tokens, num_q_heads, head_dim] (a view of a fused qkv is fine).
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim] of q's dtype, float8_e4m3fn or int8, or
    int4 as uint8 with head_dim / 2 bytes; key_scale, value_scale and the formats: kv_cache.py.
    block_tables: [num_requests, max_blocks] int32, -1 pads.  query_start_loc: [num_requests + 1] int32, starts at 0.
    seq_lens: [num_requests] int32, cached tokens including this step's; 0 marks a padding request, whose rows become
    zero.  Row i of a request is slot seq_len - query_len + i, and sees slots up to its own.
    tree_mask: [num_tokens] int64: all slots before the request's rows are seen, of the rows' own slots those whose bit
    (slot - (seq_len - query_len)) is set.  positions: [num_tokens] int64, with tree_mask only: the depth-wise position
    of each row, which ALiBi and the window use for it both as query and as key; not below seq_len - query_len.
    sliding_window w: only position_q - position_k < w.  alibi_slopes: [num_q_heads] fp32, adds slope * (position_k -
    position_q).  soft_cap c: c * tanh(score / c).  sinks: [num_q_heads] fp32, a score of each head that takes part in
    the softmax without a value.  scale multiplies q.k.  max_query_len: host-side upper bound.
    is_prefix_settled: keys before this call's rows were written before the last copy or library call of the stream, as
    in an engine's step, not by a kernel of this package just before: reading them may begin early.  block_tables,
    query_start_loc and seq_lens must be so in any case.
    backend: "cuda" (Hopper; ValueError if it cannot run), "reference", "auto": cuda where it can run.
    Returns [num_tokens, num_q_heads, head_dim], dtype of q; rows past query_start_loc[-1] are unspecified.  The cuda
    version rounds 8- and 4-bit caches' queries and probabilities to fp16, and its split of the keys over CTAs follows
    the batch.  Its calls on one device must be ordered, on one stream, with one call before any graph capture.
    Sources: PagedAttention, arXiv:2309.06180; split keys: Flash-Decoding; tree masks: SpecInfer, arXiv:2305.09781.
    """
    cache = KvCache(key_cache, value_cache, key_scale, value_scale)
    check_tensors(q, cache, block_tables, query_start_loc, seq_lens)
    check_rows(q, max_query_len, tree_mask, positions)
    check_options(q, sliding_window, alibi_slopes, soft_cap, sinks, out)
    call = DecodeCall(
        q=q,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        out=torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out,
        max_query_len=max_query_len,
        scale=scale,
        key_scale=key_scale,
        value_scale=value_scale,
        tree_mask=tree_mask,
        positions=positions,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        is_prefix_settled=is_prefix_settled,
        sinks=sinks,
    )
    version = select_cuda_or_reference(
        "attention.decode_attention", backend, q.is_cuda, lambda cuda: cuda.refusal(call)
    )
    version.decode_attention(call)
    return call.out


def check_rows(
    q: torch.Tensor, max_query_len: int, tree_mask: torch.Tensor | None, positions: torch.Tensor | None
) -> None:
    if not 1 <= max_query_len <= MAX_QUERY_LEN:
        raise ValueError(f"max_query_len: {max_query_len}, expected 1 to {MAX_QUERY_LEN}")
    if positions is not None and tree_mask is None:
        raise ValueError("positions: only with tree_mask; without, a row's position is its slot")
    for name, rows in (("tree_mask", tree_mask), ("positions", positions)):
        if rows is not None:
            require_shape(name, rows, (q.shape[0],))
            if rows.dtype != torch.int64 or not rows.is_contiguous():
                raise ValueError(f"{name}: must be contiguous int64, is {rows.dtype}")
