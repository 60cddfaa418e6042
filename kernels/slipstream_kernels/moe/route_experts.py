"""route_experts: contract and choice.  Which experts of a MoE layer a token goes to."""

from __future__ import annotations

import torch

from slipstream_kernels.routing import Routing, RoutingBiases, RoutingRule
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select

MAX_EXPERTS = 1024
PLAIN_RULE = RoutingRule()


def route_experts(
    logits: torch.Tensor,
    top_k: int,
    rule: RoutingRule = PLAIN_RULE,
    *,
    logit_bias: torch.Tensor | None = None,
    selection_bias: torch.Tensor | None = None,
    is_invariant: bool = False,
    backend: str = "auto",
) -> Routing:
    """The top_k best experts of each token by the rule, and the rows sorted by expert.

    logits: [num_tokens, num_experts], any float dtype; scores are fp32.  Of equals the lower expert, or group, comes
    first; NaN counts as the least.  logit_bias: [num_experts], any float dtype, added to the logits in fp32: the
    router's own, if its product has left it out.
    selection_bias: fp32 [num_experts], finite, added to scores where they are ranked.
    is_invariant: a token's weights do not depend on the number of tokens, to the bit; else sums of scores may.
    Nothing is read on the host: safe in CUDA graphs.
    Source: arXiv:2401.04088 (renormalised), arXiv:2101.03961; groups: arXiv:2405.04434; sigmoid and bias:
    arXiv:2412.19437.
    """
    require_float("logits", logits)
    require_unit_stride("logits", logits)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected [num_tokens, 1 to {MAX_EXPERTS} experts]")
    num_experts = logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: {top_k} of {num_experts} experts")
    refusal = rule.refusal(top_k, num_experts)
    if refusal is not None:
        raise ValueError(f"rule: {refusal}")
    if logit_bias is not None:
        require_float("logit_bias", logit_bias)
        require_shape("logit_bias", logit_bias, (num_experts,))
        require_unit_stride("logit_bias", logit_bias)
    if selection_bias is not None:
        require_shape("selection_bias", selection_bias, (num_experts,))
        require_unit_stride("selection_bias", selection_bias)
        if selection_bias.dtype != torch.float32:
            raise ValueError(f"selection_bias: dtype {selection_bias.dtype}, expected float32")
    biases = RoutingBiases(logit_bias, selection_bias)
    version = select("moe.route_experts", backend, logits)
    routing: Routing = version.route_experts(logits, top_k, rule, biases, is_invariant)
    return routing
