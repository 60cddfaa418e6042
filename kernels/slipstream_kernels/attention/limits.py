"""Memory of attention kernels beside their operands.  Sizes only; asks no device."""

from __future__ import annotations

from slipstream_kernels.attention.cuda import latent_attention, prefill_attention


def split_sums_bytes(num_sms: int, head_dim: int, *, is_latent: bool) -> int:
    """What the CTAs that share the keys of a tile leave for each other, on a GPU with the kernels in CUDA."""
    if is_latent:
        return latent_attention.workspace_bytes(num_sms)
    return prefill_attention.parts_bytes(num_sms, head_dim)
