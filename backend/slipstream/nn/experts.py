"""A MoE layer's MLPs: a router chooses a few for each token, whose outputs are added by the router's weights.

The rows of all tokens are sorted by expert on the device, so that each product is one launch over all experts and a
step is captured in a CUDA graph like any other. Source: arXiv:2401.04088.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.linear import ExpertLinear, Linear
from slipstream.nn.quant.activation_quant import PLAIN, Activation, ActivationQuant
from slipstream.nn.quant.unquantized import UNQUANTIZED
from slipstream.nn.spec import DecoderSpec


class Experts:
    """The router is never quantised: it is small, and a token that changes its expert changes its text."""

    def __init__(self, spec: DecoderSpec, context: LayerContext) -> None:
        assert spec.experts is not None
        self.spec = spec.experts
        self.router = Linear(spec.router, replace(context, method=UNQUANTIZED))
        self.gate_up = ExpertLinear(spec.expert_gate_up, context)
        self.down = ExpertLinear(spec.expert_down, context)

    @property
    def activation_quant(self) -> ActivationQuant[Activation]:
        return PLAIN  # the router reads it too

    def __call__(self, hidden: Activation) -> Tensor:
        """hidden: [T, hidden_size], plain."""
        assert isinstance(hidden, Tensor)
        spec = self.spec
        routing = ops.route_experts(
            self.router.apply(hidden), spec.num_experts_per_token, renormalise=spec.renormalises
        )
        inner = self.gate_up.apply_grouped(hidden, routing, by_token=True, gated=True)
        return ops.combine_experts(self.down.apply_grouped(inner, routing), routing)

    def linears(self) -> tuple[Linear, ...]:
        return (self.router, self.gate_up, self.down)
