"""reject_drafts: contract and choice.  Rejection sampling of one draft per row."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_shape, select


def reject_drafts(
    logits: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    *,
    accept_seeds: torch.Tensor,
    recover_seeds: torch.Tensor,
    positions: torch.Tensor,
    backend: str = "auto",
) -> torch.Tensor:
    """Per row: draft d with probability min(1, p(d) / q(d)), else a sample of max(p - q, 0); [num_rows] int64.

    logits: [num_rows, vocab_size] fp32 of the target; p is their distribution after temperature (> 0) and filters, as
    in ops.sample.  draft_probs q: [num_rows, vocab_size] fp32, from which draft_token_ids [num_rows] int64 was drawn.
    The result is distributed as p.  Two seeds per row, int64: both differ from the seed of the draft.
    positions: [num_rows] int64, of the token being drawn.  Source: arXiv:2302.01318, arXiv:2211.17192.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits: {logits.dtype} {tuple(logits.shape)}, expected float32 [num_rows, vocab_size]")
    require_shape("draft_probs", draft_probs, tuple(logits.shape))
    for name, tensor in (
        ("draft_token_ids", draft_token_ids),
        ("accept_seeds", accept_seeds),
        ("recover_seeds", recover_seeds),
        ("positions", positions),
    ):
        require_shape(name, tensor, (logits.shape[0],))
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected int64")
    implementation = select("spec.reject_drafts", backend, logits, "there is none in triton")
    return implementation.reject_drafts(
        logits,
        draft_probs,
        draft_token_ids,
        (temperature, top_k, top_p, min_p),
        (accept_seeds, recover_seeds),
        positions,
    )


def token_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """The distribution that ops.sample draws from: [num_rows, vocab_size] fp32.  temperature > 0 in every row."""
    implementation = select("spec.reject_drafts", backend, logits, "there is none in triton")
    return implementation.token_probs(logits, temperature, top_k, top_p, min_p)
