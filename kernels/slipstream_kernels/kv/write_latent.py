"""write_latent: contract and choice.  Norms and stores latents, rotates keys and queries of latent attention."""

from __future__ import annotations

import torch

from slipstream_kernels.latent_cache import LatentCache, StepLatents, check_latent_cache
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select
from slipstream_kernels.token_slots import check_slots


def write_latent(
    q_rope: torch.Tensor, latents: StepLatents, cache: LatentCache, q_out: torch.Tensor, *, backend: str = "auto"
) -> None:
    """RMSNorm latents, rotate the keys' shared part, store both at their slots; rotate queries.  One launch.

    q_rope: [num_tokens, num_heads, rope_dim], the last features of query heads.  q_out: of that shape, written; may be
    q_rope itself.  Last dimensions are contiguous, others strided.  Computed in fp32 with the rounding of ops.rms_norm;
    rotated features are rounded to the dtype of q_rope.  FP8 scales are absmax / 448 of 128 features.
    """
    require_shape("q_out", q_out, tuple(q_rope.shape))
    require_unit_stride("q_out", q_out)
    if q_out.dtype != q_rope.dtype:
        raise ValueError(f"q_out: dtype {q_out.dtype}, expected q_rope's {q_rope.dtype}")
    check_latents(q_rope, latents, cache)
    select("kv.write_latent", backend, q_rope).write_latent(q_rope, latents, cache, q_out)


def check_latents(q_rope: torch.Tensor, latents: StepLatents, cache: LatentCache) -> None:
    """Raise ValueError unless write_latent can take these."""
    num_tokens, _, rope_dim = q_rope.shape
    require_float("q_rope", q_rope)
    require_shape("latents.rows", latents.rows, (num_tokens, cache.rank + cache.rope_dim))
    require_shape("norm_weight", latents.norm_weight, (cache.rank,))
    for name, tensor in (("q_rope", q_rope), ("latents.rows", latents.rows), ("norm_weight", latents.norm_weight)):
        require_unit_stride(name, tensor)
        if tensor.dtype != q_rope.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected q_rope's {q_rope.dtype}")
    check_slots(latents.slots, num_tokens)
    if not latents.rope.rotary_dim == rope_dim == cache.rope_dim:
        raise ValueError(f"rope: {latents.rope.rotary_dim} features, expected {cache.rope_dim}")
    check_latent_cache(cache, q_rope.dtype)
