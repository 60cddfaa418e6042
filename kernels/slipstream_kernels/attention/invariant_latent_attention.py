"""invariant_latent_attention: contract and choice.  Absorbed attention over latents, a row alike in any step."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.latent_attention import check_call, empty_latents
from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.latent_cache import LatentCache
from slipstream_kernels.select import select


def invariant_latent_attention(
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
    positions: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each query token to its own request's cached latents; this step's latents must already be there.

    Arguments and result as ops.latent_attention's, for queries of any length (with tree_mask at most 64 a request).
    positions: [num_tokens] int64 of each row, beside tree_mask: its keys are as many, and one.
    A row gives the same bits whatever it is and whatever else is in the step, as ops.invariant_attention's do.  That is
    triton's; the reference's rows agree to fp32's rounding.
    """
    out = empty_latents(q, cache) if out is None else out
    call = LatentCall(
        q, cache, block_tables, query_start_loc, seq_lens, tree_mask, out, max_query_len, max_seq_len, scale,
        positions=positions,
    )  # fmt: skip
    check_call(call)
    if (tree_mask is None) != (positions is None):
        raise ValueError("positions: goes with tree_mask; without, a row's position is its slot")
    select("attention.invariant_latent_attention", backend, q).invariant_latent_attention(call)
    return out
