"""lora_shrink in plain torch, a tile at a time."""

from __future__ import annotations

import torch

from slipstream_kernels.lora.tiles import NO_ROW, NO_SLOT, AdapterTiles


def lora_shrink(x: torch.Tensor, a: torch.Tensor, tiles: AdapterTiles) -> torch.Tensor:
    """See ops.lora_shrink."""
    inner = x.new_zeros((1, a.shape[0], *tiles.rows.shape, a.shape[2]), dtype=torch.float32)
    for tile, (slot, rows) in enumerate(zip(tiles.slots.tolist(), tiles.rows)):
        if slot != NO_SLOT:
            of_tile = x[rows[rows != NO_ROW].long()]
            inner[0, :, tile, : len(of_tile)] = torch.matmul(of_tile, a[:, slot].transpose(1, 2)).float()
    return inner.flatten(2, 3)
