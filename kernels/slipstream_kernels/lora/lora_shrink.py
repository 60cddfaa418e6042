"""lora_shrink: contract and choice.  The first product of LoRA adapters, to their rank."""

from __future__ import annotations

import torch

from slipstream_kernels.lora.tiles import AdapterTiles
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select


def lora_shrink(x: torch.Tensor, a: torch.Tensor, tiles: AdapterTiles, *, backend: str = "auto") -> torch.Tensor:
    """Return x Aᵀ of the adapter of each tile's rows, as partial sums over the features of x.

    x: [T, in_features], last dimension contiguous; a: [parts, num_slots, rank, in_features], x's dtype, contiguous.
    Returns [num_sums, parts, N * tile_rows, rank] fp32; where a tile has no row the values mean nothing. lora_expand
    takes it.  Source: arXiv:2106.09685; many adapters in one batch: arXiv:2311.03285.
    """
    require_float("x", x)
    require_unit_stride("x", x)
    require_shape("x", x, (x.shape[0], a.shape[-1]))
    if a.dtype != x.dtype or not a.is_contiguous():
        raise ValueError(f"a: must be contiguous and {x.dtype}")
    require_shape("tiles.slots", tiles.slots, (tiles.rows.shape[0],))
    return select("lora.lora_shrink", backend, x).lora_shrink(x, a, tiles)
