"""Routing: which experts a step's tokens go to, and the order in which their rows are multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_LOGIT = 1e30  # logits beyond are cut to it, and NaN counts as the smallest: every token gets experts
LEAST_TOTAL = 1e-20  # added to the scores that weights are shares of: sigmoids of all chosen experts may be zero
SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2sum")


@dataclass(frozen=True)
class RoutingRule:
    """How a token's experts are chosen and weighed.

    score: "softmax" or "sigmoid" of the router's logits; a bias that is given beside them ranks, and does not weigh.
    num_groups, topk_groups: experts lie in groups of equal size, and only those of the best groups are chosen, by
    group_score, the "max" or the sum of the two best ("top2sum") of what ranks.  renormalises: the weights of a token
    add up to one, before they are multiplied by scale.  Softmax of the chosen logits alone is softmax, renormalised.
    """

    score: str = "softmax"
    renormalises: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"

    def refusal(self, top_k: int, num_experts: int) -> str | None:
        """Why it is no rule for so many experts, or None."""
        if self.score not in SCORES or self.group_score not in GROUP_SCORES:
            return f"score {self.score!r} and group_score {self.group_score!r} must be of {SCORES} and {GROUP_SCORES}"
        if self.num_groups < 1 or num_experts % self.num_groups:
            return f"{num_experts} experts are not {self.num_groups} groups of equal size"
        size = num_experts // self.num_groups
        if not 1 <= self.topk_groups <= self.num_groups or top_k > self.topk_groups * size:
            return f"{top_k} experts of {self.topk_groups} of {self.num_groups} groups of {size}"
        if self.num_groups > 1 and self.group_score == "top2sum" and size < 2:
            return "groups of one expert have no two best"
        return None


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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of tokens, of rows and of experts."""
        return self.num_tokens, self.num_rows, self.num_experts


def empty_routing(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Routing:
    """Uninitialised."""
    return Routing(
        torch.empty(num_tokens, top_k, device=device),
        torch.empty(num_tokens, top_k, dtype=torch.int32, device=device),
        torch.empty(num_tokens * top_k, dtype=torch.int32, device=device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=device),
    )
