"""invariant_attention: contract and choice.  Attention whose rows do not depend on what else is in the step."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import check_positions, checked_call
from slipstream_kernels.attention.attention_call import AttentionMetadata, AttentionOptions
from slipstream_kernels.attention.paged_attention import triton_refusal
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.select import select

MAX_INVARIANT_GROUP = 64  # query heads of a kv head: one token's rows must fit a tile


def invariant_attention(
    q: torch.Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached blocks; this step's keys must already be there.

    Arguments and result as ops.decode_attention's, for queries of any length; a tree_mask comes with positions.
    The same token over the same keys gives the same bits as a decode row, in a prompt, in any chunk of it, and as a
    draft in a chain or a tree: keys are taken in the order of their positions, and the softmax is cut at fixed
    positions, whoever computes its parts.  That is triton's; the reference's rows agree to fp32's rounding.
    """
    call = checked_call(q, cache, metadata, options, out)
    check_positions(metadata)
    refusal = _triton_refusal(q, cache.key)
    select("attention.invariant_attention", backend, q, refusal).invariant_attention(call)
    return call.out


def _triton_refusal(q: torch.Tensor, key_cache: torch.Tensor) -> str | None:
    group = q.shape[1] // key_cache.shape[1]
    if group > MAX_INVARIANT_GROUP:
        return f"{group} query heads share a kv head, at most {MAX_INVARIANT_GROUP}"
    return triton_refusal(q, key_cache)
