"""invariant_latent_attention in plain torch: the reference of latent attention."""

from __future__ import annotations

from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.attention.reference.latent_attention import latent_attention


def invariant_latent_attention(call: LatentCall) -> None:
    """See ops.invariant_latent_attention; writes call.out."""
    latent_attention(call)
