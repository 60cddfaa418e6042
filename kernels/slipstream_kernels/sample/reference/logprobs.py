"""top_logprobs in plain torch."""

from __future__ import annotations

import torch


def top_logprobs(
    logits: torch.Tensor, k: int, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ops.top_logprobs."""
    logits = logits.float()
    log_normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen_logits = logits.gather(1, chosen[:, None])
    rank = (logits > chosen_logits).sum(dim=-1) + 1
    values, token_ids = torch.topk(logits, k, dim=-1)
    return (chosen_logits - log_normaliser).view(-1), rank, values - log_normaliser, token_ids
