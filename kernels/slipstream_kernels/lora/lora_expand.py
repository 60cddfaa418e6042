"""lora_expand: contract and choice.  The second product of LoRA adapters, added to that of the layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream_kernels.lora.tiles import AdapterTiles
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select

MAX_PARTS = 4


def lora_expand(
    y: torch.Tensor,
    inner: torch.Tensor,
    b: torch.Tensor,
    tiles: AdapterTiles,
    part_sizes: Sequence[int],
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Add to y, in place, (x Aᵀ) Bᵀ of the adapter of each tile's rows, and return it.

    y: [T, out_features], last dimension contiguous; inner: what lora_shrink returned, rounded here to y's dtype once
    it is summed; b: [num_slots, rank, out_features], y's dtype, contiguous, with the adapters' scales in it.
    part_sizes: how many columns of y take each part of `inner`, in order; MAX_PARTS at most.
    """
    require_float("y", y)
    require_unit_stride("y", y)
    _, rank, out_features = b.shape
    require_shape("y", y, (y.shape[0], out_features))
    if b.dtype != y.dtype or not b.is_contiguous():
        raise ValueError(f"b: must be contiguous and {y.dtype}")
    if len(part_sizes) > MAX_PARTS or sum(part_sizes) != out_features:
        raise ValueError(f"part_sizes: {tuple(part_sizes)}, expected {MAX_PARTS} at most that sum to {out_features}")
    require_shape("inner", inner, (inner.shape[0], len(part_sizes), tiles.rows.numel(), rank))
    return select("lora.lora_expand", backend, y).lora_expand(y, inner, b, tiles, part_sizes)
