"""apply_penalties and apply_bias in plain torch: work grows with the seen tokens, not with the vocabulary."""

from __future__ import annotations

import torch

from slipstream_kernels.sample.penalties import Penalties


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    num_tokens: torch.Tensor,
    penalties: Penalties,
) -> None:
    """See ops.apply_penalties."""
    vocab_size = logits.shape[1]
    columns = torch.arange(token_ids.shape[1], device=logits.device)
    rows, columns_seen = (columns < num_tokens[:, None]).nonzero(as_tuple=True)
    is_output = columns_seen >= prompt_lens[rows]
    pairs, pair_of = torch.unique(rows * vocab_size + token_ids[rows, columns_seen], return_inverse=True)
    counts = torch.zeros(pairs.shape, dtype=torch.float32, device=logits.device)
    counts.index_add_(0, pair_of, is_output.float())

    flat, pair_rows = logits.view(-1), pairs // vocab_size
    values = flat[pairs]
    repetition, presence, frequency = penalties
    if repetition is not None:
        penalty = repetition[pair_rows]
        values = torch.where(values > 0, values / penalty, values * penalty)
    if frequency is not None:
        values = values - frequency[pair_rows] * counts
    if presence is not None:
        values = values - presence[pair_rows] * (counts > 0)
    flat[pairs] = values


def apply_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """See ops.apply_bias."""
    logits.index_put_((rows, token_ids), values, accumulate=True)
