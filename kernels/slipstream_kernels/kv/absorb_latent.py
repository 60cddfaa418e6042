"""absorb_latent: contract and choice.  Queries into the space of latents, and this step's latents into the cache."""

from __future__ import annotations

import torch

from slipstream_kernels.gemm.head_mm import check_heads, few_tokens_refusal
from slipstream_kernels.kv.write_latent import check_latents
from slipstream_kernels.latent_cache import LatentCache, StepLatents
from slipstream_kernels.select import select


def absorb_latent(
    q: torch.Tensor, keys: torch.Tensor, latents: StepLatents, cache: LatentCache, *, backend: str = "auto"
) -> torch.Tensor:
    """ops.write_latent, and ops.head_mm of the other features of queries with `keys`.  One launch for few tokens.

    q: [num_tokens, num_heads, nope_dim + rope_dim].  keys: [num_heads, nope_dim, rank], what makes keys of latents.
    Returns [num_tokens, num_heads, rank + rope_dim], queries as ops.latent_attention takes them.
    """
    nope_dim = keys.shape[1]
    q_nope, q_rope, weight = q[..., :nope_dim], q[..., nope_dim:], keys.transpose(1, 2)
    absorbed = q.new_empty(*q.shape[:2], cache.rank + cache.rope_dim)
    check_heads(q_nope, weight, absorbed[..., : cache.rank])
    check_latents(q_rope, latents, cache)
    implementation = select("kv.absorb_latent", backend, q, few_tokens_refusal(q_nope))
    implementation.absorb_latent(q_nope, q_rope, weight, latents, cache, absorbed)
    return absorbed
