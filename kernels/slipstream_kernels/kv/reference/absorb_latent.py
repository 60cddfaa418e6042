"""absorb_latent by two ops, one after the other."""

from __future__ import annotations

import torch

from slipstream_kernels.gemm.head_mm import head_mm
from slipstream_kernels.kv.write_latent import write_latent
from slipstream_kernels.latent_cache import LatentCache, StepLatents


def absorb_latent(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    weight: torch.Tensor,
    latents: StepLatents,
    cache: LatentCache,
    absorbed: torch.Tensor,
) -> None:
    """See ops.absorb_latent.  weight: as ops.head_mm takes it.  absorbed: written."""
    head_mm(q_nope, weight, absorbed[..., : cache.rank])
    write_latent(q_rope, latents, cache, absorbed[..., cache.rank :])
