"""apply_token_masks in plain torch, without branches: masked_fill and where take four times as long for a mixed mask,
because a processor cannot predict it."""

from __future__ import annotations

import torch

# [256, 8]: of each byte's eight tokens, all bits of those that it forbids
FORBIDDEN = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.int32) - 1
FRACTION = 0x007FFFFF  # of fp32: all bits but these are -inf


def apply_token_masks(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """See ops.apply_token_masks."""
    forbidden_of = FORBIDDEN.to(logits.device)
    num_tokens = min(logits.shape[1], 32 * bits.shape[1])
    for row, words in zip(rows.tolist(), bits):  # a row at a time stays in the cache
        forbidden = forbidden_of.index_select(0, words.view(torch.uint8).int()).view(-1)[:num_tokens]
        values = logits[row, :num_tokens].view(torch.int32)
        values.bitwise_or_(forbidden).bitwise_and_(forbidden.bitwise_and_(FRACTION).bitwise_not_())
