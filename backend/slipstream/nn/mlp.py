"""The gated MLP: down(silu(gate(x)) · up(x)), with gate and up as one product. Source: arXiv:2002.05202."""

from __future__ import annotations

from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.linear import Linear
from slipstream.nn.quant.activation_quant import Activation, ActivationQuant
from slipstream.nn.spec import DecoderSpec


class MLP:
    def __init__(self, spec: DecoderSpec, context: LayerContext) -> None:
        self.gate_up = Linear(spec.gate_up, context)
        self.down = Linear(spec.down, context)

    @property
    def activation_quant(self) -> ActivationQuant[Activation]:
        return self.gate_up.activation_quant

    def __call__(self, hidden: Activation) -> Tensor:
        """hidden: rows quantised as gate_up wants them."""
        return self.down.apply(self.gate_up.apply_gated(hidden, self.down.activation_quant))

    def linears(self) -> tuple[Linear, ...]:
        return (self.gate_up, self.down)
