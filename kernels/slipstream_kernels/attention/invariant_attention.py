"""invariant_attention: contract and choice.  Attention whose rows do not depend on what else is in the step."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import check_options, check_tensors
from slipstream_kernels.attention.decode_attention import check_rows
from slipstream_kernels.attention.decode_call import DecodeCall
from slipstream_kernels.attention.paged_attention import triton_refusal
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.select import select

MAX_INVARIANT_GROUP = 64  # query heads of a kv head: one token's rows must fit a tile


def invariant_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached blocks; this step's keys must already be there.

    Arguments and result as ops.decode_attention's, for queries of any length (with tree_mask at most 64 a request).
    max_query_len, max_seq_len: host-side upper bounds.
    The same token over the same keys gives the same bits as a decode row, in a prompt, in any chunk of it, and as a
    draft in a chain or a tree: keys are taken in the order of their positions, and the softmax is cut at fixed
    positions, whoever computes its parts.  That is triton's; the reference's rows agree to fp32's rounding.
    """
    cache = KvCache(key_cache, value_cache, key_scale, value_scale)
    check_tensors(q, cache, block_tables, query_start_loc, seq_lens)
    if tree_mask is not None:
        check_rows(q, max_query_len, tree_mask, positions)
    if (tree_mask is None) != (positions is None):
        raise ValueError("positions: goes with tree_mask; without, a row's position is its slot")
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
        is_prefix_settled=False,
        sinks=sinks,
    )
    refusal = _triton_refusal(q, key_cache)
    select("attention.invariant_attention", backend, q, refusal).invariant_attention(call, max_seq_len)
    return call.out


def _triton_refusal(q: torch.Tensor, key_cache: torch.Tensor) -> str | None:
    group = q.shape[1] // key_cache.shape[1]
    if group > MAX_INVARIANT_GROUP:
        return f"{group} query heads share a kv head, at most {MAX_INVARIANT_GROUP}"
    return triton_refusal(q, key_cache)
