"""Routing: which experts a step's tokens go to, and the order in which their rows are multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_LOGIT = 1e30  # logits beyond are cut to it, and NaN counts as the smallest: every token gets experts


@dataclass(frozen=True)
class Routing:
    """Each token and one of its experts make a pair, a row of every product; rows are sorted by expert, then token.

    weights: [num_tokens, top_k] fp32, of the experts of each token, the likeliest first.
    rows: int32 of that shape, the row of each pair.  tokens: [num_tokens * top_k] int32, the token of each row.
    offsets: [num_experts + 1] int32: the rows of expert e are offsets[e] .. offsets[e + 1].
    All lie on the device: no number of rows is known on the host.
    """

    weights: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    offsets: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.weights.shape[0]

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1


def empty_routing(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Routing:
    """Uninitialised."""
    return Routing(
        torch.empty(num_tokens, top_k, device=device),
        torch.empty(num_tokens, top_k, dtype=torch.int32, device=device),
        torch.empty(num_tokens * top_k, dtype=torch.int32, device=device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=device),
    )
