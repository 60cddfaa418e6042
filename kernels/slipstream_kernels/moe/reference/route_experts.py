"""route_experts in plain torch."""

from __future__ import annotations

import torch

from slipstream_kernels.routing import LARGEST_LOGIT, LEAST_TOTAL, Routing, RoutingBiases, RoutingRule


def route_experts(
    logits: torch.Tensor, top_k: int, rule: RoutingRule, biases: RoutingBiases, is_invariant: bool
) -> Routing:
    """See ops.route_experts.  No row depends on the others."""
    num_tokens, num_experts = logits.shape
    biased = logits.float() if biases.of_logits is None else logits.float() + biases.of_logits.float()
    finite = biased.nan_to_num(-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    scores = finite.sigmoid() if rule.score == "sigmoid" else finite.softmax(dim=-1)
    ranks = scores if biases.of_selection is None else scores + biases.of_selection
    if rule.num_groups > 1:
        ranks = _in_best_groups(ranks, rule)
    experts = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    if rule.renormalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_TOTAL)
    weights = weights * rule.scale
    order = experts.flatten().argsort(stable=True)
    rows = torch.empty_like(order, dtype=torch.int32)
    rows[order] = torch.arange(num_tokens * top_k, dtype=torch.int32, device=logits.device)
    counts = (experts.flatten()[:, None] == torch.arange(num_experts, device=logits.device)).sum(dim=0)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return Routing(weights.contiguous(), rows.view(num_tokens, top_k), (order // top_k).int(), offsets)


def _in_best_groups(ranks: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """ranks, of experts beyond the best groups -inf."""
    groups = ranks.unflatten(1, (rule.num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(dim=-1) if rule.group_score == "top2sum" else groups.amax(dim=-1)
    left_out = best.sort(dim=-1, descending=True, stable=True).indices[:, rule.topk_groups :]
    is_left_out = torch.zeros_like(best, dtype=torch.bool).scatter_(1, left_out, True)
    return groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
