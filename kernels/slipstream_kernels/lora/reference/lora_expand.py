"""lora_expand in plain torch, a tile at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream_kernels.lora.tiles import NO_ROW, NO_SLOT, AdapterTiles


def lora_expand(
    y: torch.Tensor, inner: torch.Tensor, b: torch.Tensor, tiles: AdapterTiles, part_sizes: Sequence[int]
) -> torch.Tensor:
    """See ops.lora_expand."""
    of_tiles = inner.sum(0).to(y.dtype).unflatten(1, tiles.rows.shape)
    for tile, (slot, rows) in enumerate(zip(tiles.slots.tolist(), tiles.rows)):
        if slot != NO_SLOT:
            own = rows[rows != NO_ROW].long()
            products = [
                of_part[tile, : len(own)] @ columns
                for of_part, columns in zip(of_tiles, b[slot].split(list(part_sizes), dim=1))
            ]
            y[own] += torch.cat(products, dim=1)
    return y
