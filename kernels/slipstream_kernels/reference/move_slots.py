"""move_slots in plain torch: read all, then write all."""

from __future__ import annotations

import torch


def move_slots(tensors: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor, starts: torch.Tensor) -> None:
    """See ops.move_slots.  tensors: [num_blocks, num_kv_heads, block_size, …]."""
    for tensor in tensors:
        size = tensor.shape[2]
        stored = (
            tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
        )  # fp8 has no indexing on some devices
        stored[targets // size, :, targets % size] = stored[sources // size, :, sources % size]
