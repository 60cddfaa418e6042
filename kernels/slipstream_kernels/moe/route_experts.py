"""route_experts, combine_experts: contract and choice.  To the experts of a MoE layer and back."""

from __future__ import annotations

import torch

from slipstream_kernels.routing import Routing
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select

MAX_EXPERTS = 1024


def route_experts(logits: torch.Tensor, top_k: int, *, renormalise: bool = True, backend: str = "auto") -> Routing:
    """The top_k likeliest experts of each token by softmax(logits), and the rows sorted by expert.

    logits: [num_tokens, num_experts], any float dtype; the softmax is fp32.  Of equals the lower expert comes first,
    NaN counts as the least.
    renormalise: a token's weights add up to one.  Nothing is read on the host: safe in CUDA graphs.
    Source: arXiv:2401.04088 (renormalised), arXiv:2101.03961.
    """
    require_float("logits", logits)
    require_unit_stride("logits", logits)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected [num_tokens, 1 to {MAX_EXPERTS} experts]")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k: {top_k} of {logits.shape[1]} experts")
    return select("moe.route_experts", backend, logits).route_experts(logits, top_k, renormalise)


def combine_experts(y: torch.Tensor, routing: Routing, *, backend: str = "auto") -> torch.Tensor:
    """Each token's sum of its rows of y times their weights, in fp32 and the order of its experts, in y's dtype.

    y: [num_rows, size].  Returns [num_tokens, size].
    """
    require_float("y", y)
    require_shape("y", y, (routing.num_rows, y.shape[-1]))
    require_unit_stride("y", y)
    return select("moe.route_experts", backend, y).combine_experts(y, routing)
