"""The gated MLP: down(silu(gate(x)) · up(x)), with gate and up as one product. Source: arXiv:2002.05202."""

from __future__ import annotations

from torch import Tensor

from slipstream.nn.linear import Linear
from slipstream.nn.placement import Placement
from slipstream.nn.quant.input_form import Activation, InputForm
from slipstream.nn.spec import DecoderSpec


class MLP:
    def __init__(self, spec: DecoderSpec, placement: Placement) -> None:
        self.gate_up = Linear(spec.gate_up, placement)
        self.down = Linear(spec.down, placement)

    @property
    def input_form(self) -> InputForm[Activation]:
        return self.gate_up.input_form

    def __call__(self, hidden: Activation) -> Tensor:
        """hidden: rows in the input form."""
        return self.down.apply(self.gate_up.apply_gated(hidden, self.down.input_form))

    def linears(self) -> tuple[Linear, ...]:
        return (self.gate_up, self.down)
