"""route_experts and combine_experts in plain torch."""

from __future__ import annotations

import torch

from slipstream_kernels.routing import LARGEST_LOGIT, Routing


def route_experts(logits: torch.Tensor, top_k: int, renormalise: bool) -> Routing:
    """See ops.route_experts."""
    num_tokens, num_experts = logits.shape
    finite = logits.float().nan_to_num(-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    probabilities, experts = finite.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = probabilities[:, :top_k], experts[:, :top_k]
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    order = experts.flatten().argsort(stable=True)
    rows = torch.empty_like(order, dtype=torch.int32)
    rows[order] = torch.arange(num_tokens * top_k, dtype=torch.int32, device=logits.device)
    counts = (experts.flatten()[:, None] == torch.arange(num_experts, device=logits.device)).sum(dim=0)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return Routing(weights.contiguous(), rows.view(num_tokens, top_k), (order // top_k).int(), offsets)


def combine_experts(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """See ops.combine_experts."""
    chosen = y[routing.rows.long()].float()
    return (chosen * routing.weights[..., None]).sum(dim=1).to(y.dtype)
