"""MLPs of an MoE layer: a router selects top_k experts per token and sums their outputs with the router's weights.

The rows of all tokens are sorted by expert on the device, so that each product is one launch over all experts and a
step is captured in a CUDA graph like any other. Source: arXiv:2401.04088; shared experts: arXiv:2401.06066.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream_kernels import ops
from slipstream_kernels.ops import PLAIN, Activation, ActivationQuant
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import ExpertsSpec
from slipstream.nn.linear import ExpertLinear, Linear
from slipstream.nn.mlp import MLP
from slipstream.nn.vector import Vector
from slipstream.nn.weight_slot import SELECTION_BIAS


class Experts:
    """The router is never quantised: it is small, and a token that changes its expert changes its text."""

    def __init__(self, spec: ExpertsSpec, context: LayerContext) -> None:
        self.spec = spec
        self.router = Linear(spec.router, context.of_plain)
        self.selection_bias = Vector(spec.num_experts, context) if spec.routing.selection_bias else None
        self.gate_up = ExpertLinear(spec.gate_up, context)
        self.down = ExpertLinear(spec.down, context)
        self.shared = None if spec.shared is None else MLP(spec.shared, replace(context, lora=None))
        self.shared_gate = Linear(spec.gate, context.of_plain) if spec.shared_gate else None
        self._beside = context.beside
        self._own = context.parallel.experts(spec.num_experts) if context.parallel.splits_experts else None

    @property
    def activation_quant(self) -> ActivationQuant[Activation]:
        return PLAIN  # the router reads it too

    def __call__(self, hidden: Activation) -> Tensor:
        """hidden: [T, hidden_size], plain."""
        assert isinstance(hidden, Tensor)
        routing, bias = self.spec.routing, self.selection_bias
        shared, gate = self._of_shared(hidden)
        logits, logit_bias = self.router.apply_before_bias(hidden)
        rows = ops.route_experts(
            logits,
            routing.num_experts_per_token,
            routing.rule,
            logit_bias=logit_bias,
            selection_bias=None if bias is None else bias.values,
            is_invariant=self.router.weight.kind.deterministic,
        )
        if self._own is not None:
            rows = ops.local_routing(rows, self._own)
        inner = self._gated(hidden, rows)
        results = self.down.apply_grouped(inner, rows)
        if self._own is not None:
            results = ops.local_rows(results, rows)
        if shared is not None:
            self._beside.join(hidden)
        return ops.combine_experts(results, rows, self.down.bias, shared=shared, shared_gate=gate)

    def _gated(self, hidden: Tensor, rows: ops.Routing) -> Activation:
        """What `down` reads: silu is part of the product or of what quantises it, other activations come after it."""
        clamped = self.spec.clamped
        if clamped is None:
            quant = self.down.activation_quant
            return self.gate_up.apply_grouped_gated(hidden, rows, quant=quant, by_token=True)
        both = self.gate_up.apply_grouped(hidden, rows, by_token=True)
        return ops.gate_experts(both, rows, self.gate_up.bias, alpha=clamped.alpha, limit=clamped.limit)

    def _of_shared(self, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The shared MLP's result and its gate before the sigmoid, which are ready once the side stream is joined.

        Their products fill a GPU that the routed experts' small kernels leave idle. Beside them nothing may draw from
        skinny_gemm's queue: a router has too few outputs for it.
        """
        if self.shared is None:
            return None, None
        with self._beside.fork(hidden):
            gate = None if self.shared_gate is None else self.shared_gate.apply(hidden)
            return self.shared(self.shared.activation_quant.cast(hidden)), gate

    def linears(self) -> tuple[Linear, ...]:
        own = (self.router, self.gate_up, self.down)
        shared = () if self.shared is None else self.shared.linears()
        return (*own, *shared, *(() if self.shared_gate is None else (self.shared_gate,)))

    def vectors(self) -> dict[tuple[str, str], Vector]:
        """By module and suffix."""
        bias = self.selection_bias
        return {} if bias is None else {("selection_bias", SELECTION_BIAS): bias}
