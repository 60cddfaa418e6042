"""reject_drafts, token_probs in plain torch, on any device."""

from __future__ import annotations

import torch

from slipstream_kernels.sample.metadata import SamplingMetadata
from slipstream_kernels.sample.reference.sample import kept_tokens, log_exponential, row_keys
from slipstream_kernels.spec.reject_drafts import DrawnDrafts


def reject_drafts(
    logits: torch.Tensor, metadata: SamplingMetadata, drafts: DrawnDrafts, positions: torch.Tensor
) -> torch.Tensor:
    """See ops.reject_drafts."""
    probs = token_probs(logits, metadata)
    chosen = drafts.token_ids[:, None]
    p, q = probs.gather(1, chosen)[:, 0], drafts.probs.gather(1, chosen)[:, 0]
    one = torch.zeros_like(drafts.token_ids, dtype=torch.int32)
    uniform = torch.exp(-log_exponential(row_keys(drafts.accept_seeds, positions), one).exp())
    rest = (probs - drafts.probs).clamp(min=0.0)
    # p == q leaves no residual mass, but then no draft is rejected
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, probs)
    ids = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    noise = log_exponential(row_keys(drafts.recover_seeds, positions)[..., None], ids)
    recovered = (rest.log() - noise).argmax(dim=-1)
    return torch.where(uniform * q < p, drafts.token_ids, recovered)


def token_probs(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """See ops.token_probs."""
    assert metadata.temperature is not None
    z = (logits - logits.amax(dim=-1, keepdim=True)) / metadata.temperature[:, None]
    kept = kept_tokens(logits, z, *metadata.filters)
    return torch.softmax(z if kept is None else z.masked_fill(~kept, float("-inf")), dim=-1)
