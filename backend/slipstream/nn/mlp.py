"""The gated MLP: down(activation(gate(x)) · up(x)), with gate and up as one product. Source: arXiv:2002.05202."""

from __future__ import annotations

from slipstream_kernels.ops import Activation, ActivationQuant
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import DenseSpec
from slipstream.nn.linear import Linear
from slipstream.nn.lora import make_linear


class MLP:
    def __init__(self, spec: DenseSpec, context: LayerContext) -> None:
        self.spec = spec
        self.gate_up = make_linear(spec.gate_up, context)
        self.down = make_linear(spec.down, context)

    @property
    def activation_quant(self) -> ActivationQuant[Activation]:
        return self.gate_up.activation_quant

    def __call__(self, hidden: Activation) -> Tensor:
        """hidden: rows quantised as gate_up wants them."""
        gated = self.gate_up.apply_gated(hidden, self.down.activation_quant, self.spec.activation)
        return self.down.apply(gated)

    def linears(self) -> tuple[Linear, ...]:
        return (self.gate_up, self.down)
