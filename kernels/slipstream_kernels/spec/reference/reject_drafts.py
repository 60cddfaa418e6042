"""reject_drafts, token_probs in plain torch, on any device."""

from __future__ import annotations

import torch

from slipstream_kernels.sample.reference.sample import kept_tokens, log_exponential, row_keys

Filters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def reject_drafts(
    logits: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    filters: Filters,
    seeds: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
) -> torch.Tensor:
    """See ops.reject_drafts.  filters: temperature, top_k, top_p, min_p; seeds: to accept, to recover."""
    probs = token_probs(logits, *filters)
    chosen = draft_token_ids[:, None]
    p, q = probs.gather(1, chosen)[:, 0], draft_probs.gather(1, chosen)[:, 0]
    one = torch.zeros_like(draft_token_ids, dtype=torch.int32)
    uniform = torch.exp(-log_exponential(row_keys(seeds[0], positions), one).exp())
    rest = (probs - draft_probs).clamp(min=0.0)
    # p == q leaves no residual mass, but then no draft is rejected
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, probs)
    ids = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    noise = log_exponential(row_keys(seeds[1], positions)[..., None], ids)
    recovered = (rest.log() - noise).argmax(dim=-1)
    return torch.where(uniform * q < p, draft_token_ids, recovered)


def token_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.token_probs."""
    z = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    kept = kept_tokens(logits, z, top_k, top_p, min_p)
    return torch.softmax(z if kept is None else z.masked_fill(~kept, float("-inf")), dim=-1)
