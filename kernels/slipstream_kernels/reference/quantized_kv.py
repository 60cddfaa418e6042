"""Quantised KV caches in plain torch: the format of each type, writing and reading it."""

from __future__ import annotations

import torch

from slipstream_kernels.decode_call import FP8_DTYPE, INT4_DTYPE, INT8_DTYPE, TOKEN_SCALED_DTYPES

# Largest magnitude stored; int4 leaves -8 unused, so that the range is symmetric.
LARGEST = {INT8_DTYPE: 127, INT4_DTYPE: 7, FP8_DTYPE: 448}


def write_quantized_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """See ops.write_quantized_kv."""
    written = slot_mapping >= 0
    block_size = key_cache.shape[2]
    slots = slot_mapping[written]
    block, offset = slots // block_size, slots % block_size
    for x, cache, scale in ((k, key_cache, key_scale), (v, value_cache, value_scale)):
        rows = x[written].float()
        if cache.dtype in TOKEN_SCALED_DTYPES:
            assert scale is not None
            quantized, row_scale = quantize_rows(rows, cache.dtype)
            cache[block, :, offset] = quantized
            scale[block, :, offset] = row_scale
        else:
            scaled = rows if scale is None else rows / scale[:, None]
            # A view as bytes: indexed assignment of fp8 is not implemented everywhere.
            stored = scaled.clamp(-LARGEST[FP8_DTYPE], LARGEST[FP8_DTYPE]).to(FP8_DTYPE)
            cache.view(torch.uint8)[block, :, offset] = stored.view(torch.uint8)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric round-to-nearest over the last dimension: (stored values, scale fp32), x ~ value * scale.

    int4: dim 2n is the low nibble of byte n, dim 2n + 1 the high one; a nibble is the value plus 8.
    """
    largest = LARGEST[dtype]
    scale = x.abs().amax(dim=-1) / largest
    values = (x / scale.clamp(min=1e-30)[..., None]).round().clamp(-largest, largest).to(torch.int8)
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
