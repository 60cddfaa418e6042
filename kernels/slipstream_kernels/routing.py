"""Routing: the experts of a step's tokens, and the order of their rows in products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_LOGIT = 1e30  # logits are clamped to it and NaN counts as the smallest, so that every token gets experts
LEAST_TOTAL = 1e-20  # added to the sum that normalises weights: the sigmoids of all chosen experts may be zero
SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2sum")


@dataclass(frozen=True)
class RoutingRule:
    """How a token's experts are chosen and weighted.

    score: "softmax" or "sigmoid" of the router's logits; an optional bias affects the ranking, not the weights.
    num_groups, topk_groups: experts form groups of equal size, and only experts of the topk_groups best groups are
    chosen; group_score is the "max" or the sum of the two largest ("top2sum") ranking scores.  renormalises: the
    weights of a token sum to one before they are multiplied by scale.  Softmax over the chosen logits only is
    softmax, renormalised.
    """

    score: str = "softmax"
    renormalises: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"

    def refusal(self, top_k: int, num_experts: int) -> str | None:
        """Why the rule cannot be applied to num_experts experts, or None."""
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
class RoutingBiases:
    """[num_experts] each, or None.  of_logits: added to them.  of_selection: fp32, to scores where they are ranked."""

    of_logits: torch.Tensor | None
    of_selection: torch.Tensor | None


@dataclass(frozen=True)
class Routing:
    """Rows of the products, one per pair of a token and one of its experts, sorted by expert, then token.

    weights: [num_tokens, top_k] fp32, of each token's experts, likeliest first.
    rows: int32 of that shape, the row of each pair.  tokens: [num_tokens * top_k] int32, the token of each row.
    offsets: [num_experts + 1] int32: expert e has the rows offsets[e] .. offsets[e + 1].
    All tensors are on the device; the host does not know the numbers of rows.
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

    def max_tiles(self, tile_rows: int) -> int:
        """Tiles of up to tile_rows rows of one expert, if the rows are spread over the experts in the worst way."""
        begun = min(self.num_rows, self.num_experts)
        return begun + (self.num_rows - begun) // tile_rows


def empty_routing(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Routing:
    """Uninitialised."""
    return Routing(
        torch.empty(num_tokens, top_k, device=device),
        torch.empty(num_tokens, top_k, dtype=torch.int32, device=device),
        torch.empty(num_tokens * top_k, dtype=torch.int32, device=device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=device),
    )
