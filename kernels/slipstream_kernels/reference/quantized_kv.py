"""Rows of quantised KV caches in plain torch, to and from fp32; the formats are those of kv_cache.py."""

from __future__ import annotations

import torch

from slipstream_kernels.kv_cache import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE

# Largest magnitude stored; int4 leaves -8 unused, so that the range is symmetric.
LARGEST = {INT8_DTYPE: 127, INT4_DTYPE: 7, FP8_DTYPE: 448}
SMALLEST_SCALE = 1e-30  # a head of zeros has scale 0, and is divided by this


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric round-to-nearest over the last dimension: (stored values, scale fp32), x ~ value * scale."""
    largest = LARGEST[dtype]
    scale = x.abs().amax(dim=-1) / largest
    values = (x / scale.clamp(min=SMALLEST_SCALE)[..., None]).round().clamp(-largest, largest).to(torch.int8)
    if dtype == INT8_DTYPE:
        return values, scale
    nibbles = (values + 8).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scale


def dequantize_rows(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows of a cache of any type as fp32 [..., head_dim].  scale: [...] (int8, int4), or what broadcasts to it."""
    if cache.dtype == INT4_DTYPE:
        values = torch.stack([cache & 15, cache >> 4], dim=-1).flatten(-2).float() - 8
    else:
        values = cache.float()
    return values if scale is None else values * scale.float()[..., None]
