"""Compares a model with a reference on the same text: perplexity, Kullback-Leibler divergence, top-1 agreement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measures:
    """perplexity: over all predicted tokens. divergence: mean KL(reference || model) in nats per token.

    agreement: fraction of tokens whose most likely successor is the reference's.
    """

    perplexity: float
    divergence: float
    agreement: float


def compare(windows: Tensor, model: Iterable[Tensor], reference: Iterable[Tensor]) -> Measures:
    """windows: [num_windows, window_tokens]. model, reference: logits of each window [window_tokens, vocab_size]."""
    totals = torch.zeros(3, dtype=torch.float64)
    for window, ours, theirs in zip(windows, model, reference):
        totals += _window_totals(window.to(ours.device), ours, theirs).cpu()
    loss, divergence, agreement = (totals / (windows.shape[0] * (windows.shape[1] - 1))).tolist()
    return Measures(math.exp(loss), divergence, agreement)


def _window_totals(window: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """Sums of loss, divergence and agreement over the tokens of a window that have a successor in it."""
    log_p, log_q = theirs[:-1].log_softmax(-1), ours[:-1].log_softmax(-1)
    loss = -log_q.gather(1, window[1:, None]).double().sum()
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
    agreement = (ours[:-1].argmax(-1) == theirs[:-1].argmax(-1)).double().sum()
    return torch.stack((loss, divergence, agreement))
