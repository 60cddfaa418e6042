"""write_latent in plain torch, and the reverse: rows of a latent cache as numbers."""

from __future__ import annotations

import torch

from slipstream_kernels.kv.reference.quantized_kv import LARGEST
from slipstream_kernels.kv.reference.rope_write_kv import rotate
from slipstream_kernels.kv_cache import FP8_DTYPE
from slipstream_kernels.latent_cache import LATENT_GROUP, LatentCache, StepLatents
from slipstream_kernels.norm.reference.rms_norm import rms_norm

SMALLEST_ABSMAX = 1e-12  # of a group of zeros, whose scale must not be zero


def write_latent(q_rope: torch.Tensor, latents: StepLatents, cache: LatentCache, q_out: torch.Tensor) -> None:
    """See ops.write_latent."""
    rows, rope, slots = latents.rows, latents.rope, latents.slots.slot_mapping
    cos, sin = rope.cos_sin.index_select(0, latents.slots.positions).unsqueeze(1).chunk(2, dim=-1)
    q_out.copy_(rotate(q_rope, cos, sin, rope))
    values = rms_norm(rows[:, : cache.rank], latents.norm_weight, latents.eps, None, None)
    assert isinstance(values, torch.Tensor)  # without a residual there is one result
    keys = rotate(rows[:, None, cache.rank :], cos, sin, rope)[:, 0]
    is_written = slots >= 0
    _store(values[is_written], keys[is_written], slots[is_written], cache)


def _store(values: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, cache: LatentCache) -> None:
    cache.rope[slots] = keys.to(cache.rope.dtype)
    if not cache.is_fp8:
        cache.values[slots] = values
        return
    groups = values.float().unflatten(1, (-1, LATENT_GROUP))
    scales = groups.abs().amax(dim=-1).clamp(min=SMALLEST_ABSMAX) / LARGEST[FP8_DTYPE]
    stored = (groups / scales[..., None]).clamp(-LARGEST[FP8_DTYPE], LARGEST[FP8_DTYPE]).to(FP8_DTYPE)
    cache.values.view(torch.uint8)[slots] = stored.flatten(1).view(torch.uint8)  # fp8 has no indexing everywhere
    cache.scales[slots] = scales


def read_latents(cache: LatentCache, slots: torch.Tensor) -> torch.Tensor:
    """slots: [n] int64 -> [n, rank + rope_dim] fp32."""
    if not cache.is_fp8:
        return cache.rows.view(-1, cache.rows.shape[3])[slots].float()
    groups = cache.values.view(torch.uint8)[slots].view(FP8_DTYPE).float().unflatten(1, (-1, LATENT_GROUP))
    values = (groups * cache.scales[slots][..., None]).flatten(1)
    return torch.cat([values, cache.rope[slots].float()], dim=1)
