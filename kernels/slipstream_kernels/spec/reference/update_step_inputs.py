"""update_step_inputs in plain torch, on any device."""

from __future__ import annotations

import torch

from slipstream_kernels.spec.update_step_inputs import DraftRows, StepRows


def update_step_inputs(
    rows: StepRows, num_requests: int, next_ids: torch.Tensor, last: torch.Tensor, drafts: DraftRows, block_size: int
) -> None:
    """See ops.update_step_inputs.  Everything below is [num_requests, 1 + n]."""
    device = next_ids.device
    token_ids, last = drafts.token_ids[:num_requests], last[:num_requests]
    numbers = torch.arange(1 + token_ids.shape[1], device=device)
    starts = rows.positions[last][:, None] + 1
    slots = starts + numbers
    columns = slots // block_size
    blocks = rows.block_tables[:num_requests].long()
    is_there = columns < blocks.shape[1]
    blocks = blocks.gather(1, columns.clamp(max=blocks.shape[1] - 1))
    is_whole = (is_there & (blocks >= 0)).all(dim=1, keepdim=True)
    end = num_requests * len(numbers)
    rows.token_ids[:end] = torch.cat([next_ids[last][:, None], token_ids], dim=1).flatten()
    rows.slot_mapping[:end] = torch.where(is_whole, blocks * block_size + slots % block_size, -1).flatten()
    rows.seq_lens[:num_requests] = torch.where(is_whole, starts + len(numbers), 0)[:, 0]
    first = torch.zeros_like(starts)
    if drafts.depths is None or drafts.words is None:
        depths = numbers.expand_as(slots)
        words = (((torch.ones_like(numbers) << numbers) - 1) | (torch.ones_like(numbers) << numbers)).expand_as(slots)
    else:
        depths = torch.cat([first, drafts.depths[:num_requests]], dim=1)
        words = torch.cat([first + 1, drafts.words[:num_requests]], dim=1)
    rows.positions[:end] = (starts + depths).flatten()
    if rows.tree_mask is not None:
        rows.tree_mask[:end] = words.flatten()
