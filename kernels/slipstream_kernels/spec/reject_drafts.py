"""reject_drafts: contract and choice.  Rejection sampling of one draft per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream_kernels.sample.metadata import SamplingMetadata
from slipstream_kernels.select import require_shape, select


@dataclass(frozen=True)
class DrawnDrafts:
    """One draft per row.  token_ids: [num_rows] int64, drawn from probs, [num_rows, vocab_size] fp32.

    accept_seeds, recover_seeds: [num_rows] int64; both differ from the seed that drew the draft.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor
    accept_seeds: torch.Tensor
    recover_seeds: torch.Tensor


def reject_drafts(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    drafts: DrawnDrafts,
    positions: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Per row: draft d with probability min(1, p(d) / q(d)), else a sample of max(p - q, 0); [num_rows] int64.

    logits: [num_rows, vocab_size] fp32 of the target; p is their distribution after temperature (> 0) and filters, as
    in ops.sample, and q the drafts'.  The result is distributed as p.
    positions: [num_rows] int64, of the token being drawn.  Source: arXiv:2302.01318, arXiv:2211.17192.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits: {logits.dtype} {tuple(logits.shape)}, expected float32 [num_rows, vocab_size]")
    _require_temperature(metadata)
    require_shape("drafts.probs", drafts.probs, tuple(logits.shape))
    for name, tensor in (
        ("drafts.token_ids", drafts.token_ids),
        ("accept_seeds", drafts.accept_seeds),
        ("recover_seeds", drafts.recover_seeds),
        ("positions", positions),
    ):
        require_shape(name, tensor, (logits.shape[0],))
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected int64")
    implementation = select("spec.reject_drafts", backend, logits, "there is none in triton")
    return implementation.reject_drafts(logits, metadata, drafts, positions)


def token_probs(logits: torch.Tensor, metadata: SamplingMetadata, *, backend: str = "auto") -> torch.Tensor:
    """The distribution that ops.sample draws from: [num_rows, vocab_size] fp32.  temperature > 0 in every row."""
    _require_temperature(metadata)
    implementation = select("spec.reject_drafts", backend, logits, "there is none in triton")
    return implementation.token_probs(logits, metadata)


def _require_temperature(metadata: SamplingMetadata) -> None:
    if metadata.temperature is None:
        raise ValueError("temperature: None, expected more than 0 in every row")
