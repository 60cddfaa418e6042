"""compact_kv in plain torch: read all, then write all."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def compact_kv(
    tensors: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    row_bytes: int,
    sources: torch.Tensor,
    targets: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See ops.compact_kv.  Tensors of a group: [num_blocks, num_kv_heads, block_size, …]."""
    is_move = torch.arange(sources.shape[1], device=sources.device) < counts[:, None]
    is_move &= sources != targets
    sources, targets = sources[is_move], targets[is_move]
    for tensor in tensors:
        size = tensor.shape[2]
        stored = (
            tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
        )  # fp8 has no indexing on some devices
        stored[targets // size, :, targets % size] = stored[sources // size, :, sources % size]
