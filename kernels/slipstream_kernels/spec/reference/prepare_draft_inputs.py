"""prepare_draft_inputs in plain torch, on any device."""

from __future__ import annotations

import torch

from slipstream_kernels.spec.prepare_draft_inputs import LevelPlaces, LevelRows


def prepare_draft_inputs(
    positions: torch.Tensor,
    last: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    places: LevelPlaces,
    block_size: int,
    num_positions: int,
) -> LevelRows:
    """See ops.prepare_draft_inputs."""
    first, num_rows, rows_per_level = places
    rows, width = torch.arange(num_rows, device=last.device), block_tables.shape[1]
    starts = positions[last] + 1 + first
    slots = starts[:, None] + rows
    columns = slots // block_size
    blocks = block_tables.gather(1, columns.clamp(max=width - 1)).long()
    is_there = (blocks >= 0) & (columns < width) & (seq_lens > 0)[:, None]
    is_whole = is_there.all(dim=1)
    deep = (starts[:, None] + rows // rows_per_level).clamp(max=num_positions - 1)
    return LevelRows(
        deep.flatten(),
        torch.where(is_whole[:, None], blocks * block_size + slots % block_size, -1).flatten(),
        torch.where(is_whole, starts + num_rows, 0).int(),
    )
