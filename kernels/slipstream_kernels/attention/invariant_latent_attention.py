"""invariant_latent_attention: contract and choice.  Absorbed attention over latents, a row alike in any step."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.arguments import check_positions
from slipstream_kernels.attention.attention_call import AttentionMetadata
from slipstream_kernels.attention.latent_attention import checked_latent_call
from slipstream_kernels.latent_cache import LatentCache
from slipstream_kernels.select import select


def invariant_latent_attention(
    q: torch.Tensor,
    cache: LatentCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached latents; this step's latents must already be there.

    Arguments and result as ops.latent_attention's, for queries of any length; a tree_mask comes with positions, one
    more than which are a row's keys.
    A row gives the same bits whatever it is and whatever else is in the step, as ops.invariant_attention's do.  That is
    triton's; the reference's rows agree to fp32's rounding.
    """
    call = checked_latent_call(q, cache, metadata, scale, out)
    check_positions(metadata)
    select("attention.invariant_latent_attention", backend, q).invariant_latent_attention(call)
    return call.out
