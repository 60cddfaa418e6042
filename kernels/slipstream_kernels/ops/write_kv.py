"""write_kv: contract and choice.  Appends this step's keys and values to the paged cache."""

from __future__ import annotations

import torch

from slipstream_kernels.ops.select import require_float, require_shape, require_unit_stride, select


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Store each token's key and value at its slot, in place.

    k, v: [num_tokens, num_kv_heads, head_dim], last dimension contiguous (views of a fused qkv are fine).
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], contiguous; values are cast to its
    dtype.
    slot_mapping: [num_tokens] int64, slot = block * block_size + offset; -1 writes nothing.  Slots must be distinct.
    """
    _check(k, v, key_cache, value_cache, slot_mapping)
    select("write_kv", backend, k).write_kv(k, v, key_cache, value_cache, slot_mapping)


def _check(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    if k.dim() != 3:
        raise ValueError(f"k: shape {tuple(k.shape)}, expected [num_tokens, num_kv_heads, head_dim]")
    require_float("k", k)
    require_shape("v", v, k.shape)
    require_unit_stride("k", k)
    require_unit_stride("v", v)
    if key_cache.dim() != 4 or (key_cache.shape[1], key_cache.shape[3]) != (k.shape[1], k.shape[2]):
        raise ValueError(
            f"key_cache: shape {tuple(key_cache.shape)}, expected [num_blocks, {k.shape[1]}, block_size, {k.shape[2]}]"
        )
    require_shape("value_cache", value_cache, key_cache.shape)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not cache.is_contiguous():
            raise ValueError(f"{name}: must be contiguous")
    require_shape("slot_mapping", slot_mapping, (k.shape[0],))
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping: dtype {slot_mapping.dtype}, expected int64")
