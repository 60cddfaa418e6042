"""The one linear layer of the decoder: merged parts, held by a quantisation method and multiplied by ops.linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import PADDING, LinearSpec
from slipstream.nn.quant.method import Weights
from slipstream.nn.shards import Cut
from slipstream.nn.weight_slot import WeightSlot

A = TypeVar("A", bound=ops.Activation)


class Linear:
    """y = x Wᵀ + b; x: [T, in_features] -> [T, out_features], the parts side by side in the spec's order."""

    def __init__(self, spec: LinearSpec, context: LayerContext) -> None:
        self._whole, self._parallel, self._dtype = spec, context.parallel, context.dtype
        self.spec = spec.of_rank(context.parallel)
        self.method = context.method_of(spec)
        self.weights: Weights = self.method.create_weights(self.spec, context.device, context.dtype)
        if dict(self.spec.parts).get(PADDING):
            for tensor in self.weights.values():
                tensor.zero_()
        self._weight: ops.LinearWeight | None = None  # as it is multiplied, once all is loaded
        self._missing = {(part, suffix) for part, suffix, slot in self.slots() if not slot.is_optional}

    @property
    def weight(self) -> ops.LinearWeight:
        assert self._weight is not None, "its tensors are not loaded"
        return self._weight

    @property
    def is_loaded(self) -> bool:
        return self._weight is not None

    @property
    def activation_quant(self) -> ops.ActivationQuant[ops.Activation]:
        return self.weight.input_quant

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(self.activation_quant.cast(x))

    def apply(self, x: ops.Activation) -> Tensor:
        """The product of rows that are in `activation_quant` already."""
        return ops.linear(x, self.weight)

    def apply_before_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias that it has not added yet, if any: see ops.linear_before_bias."""
        return ops.linear_before_bias(x, self.weight)

    def apply_gated(self, x: ops.Activation, quant: ops.ActivationQuant[A], activation: str = "silu") -> A:
        """activation(gate) · up of the product [gate, up], as layers of that `activation_quant` read it.

        The activation is part of the launch that multiplies or of the one that quantises.
        """
        return ops.gated_linear(x, self.weight, quant, activation)

    def slots(self) -> Iterator[tuple[str, str, WeightSlot]]:
        """(part, suffix, slot) of each tensor that a checkpoint stores for this layer: ("q", "weight", …)."""
        start, own = 0, dict(self.spec.parts)
        for part, num_rows in self._whole.parts:
            own_rows = own.get(part, 0)  # 0: an expert of another rank
            rows = slice(start, start + own_rows)
            start += own_rows
            for suffix, stored in self.method.checkpoint_tensors(self._whole, num_rows).items():
                slot = WeightSlot(
                    stored.shape,
                    partial(self._load, part, suffix, rows, self._cut(part, suffix, num_rows, own_rows)),
                    stored.dtypes,
                    std=self.spec.in_features**-0.5,  # keeps dummy activations at the scale of their input
                    is_index=stored.is_index,
                    is_optional=stored.is_optional,
                    num_rows=num_rows,
                    rows_axis=stored.rows_axis,
                    columns_axis=stored.columns_axis,
                    says_shape=stored.says_shape,
                )
                yield part, suffix, slot

    def _cut(self, part: str, suffix: str, num_rows: int, own_rows: int) -> Callable[[Tensor], Tensor | None]:
        """From a stored tensor to this rank's share of it; to None if it has none."""
        if self._parallel.size == 1:
            return lambda tensor: tensor
        if not own_rows:
            return lambda tensor: None
        whole = self.method.checkpoint_tensors(self._whole, num_rows)[suffix]
        own = self.method.checkpoint_tensors(self.spec, own_rows).get(suffix)
        if own is None:
            return lambda tensor: None
        first, _ = self.spec.columns or (0, 0)
        rows = self._whole.rows_of(part, num_rows, self._parallel)
        return Cut(f"{part}.{suffix}", whole, own, rows, slice(first, first + self.spec.in_features))

    def _load(
        self, part: str, suffix: str, rows: slice, cut: Callable[[Tensor], Tensor | None], tensor: Tensor
    ) -> None:
        own = cut(tensor)
        if own is not None:
            self.method.load(self.weights, suffix, rows, own)
        self._missing.discard((part, suffix))
        if not self._missing:  # repacked as soon as it is whole, so that only one layer exists twice
            self._finish()

    def _finish(self) -> None:
        self._weight = self.method.finish(self.weights, self.spec.num_experts, self._dtype)


class ExpertLinear(Linear):
    """The products of all experts of a layer, held and loaded as one; a row takes its expert's."""

    def __init__(self, spec: LinearSpec, context: LayerContext) -> None:
        super().__init__(spec, context.of_experts)

    @property
    def bias(self) -> Tensor | None:
        """[num_experts, of an expert], not added by apply_grouped: by what comes after it."""
        bias = self.weights.get("bias")
        return None if bias is None else bias.view(self.spec.num_experts, -1)

    def apply_grouped(self, x: ops.Activation, routing: ops.Routing, *, by_token: bool = False) -> Tensor:
        """x: a row for each row of the routing, or by_token for each token."""
        return ops.grouped_linear(x, self.weight, routing, by_token=by_token)

    def apply_grouped_gated(
        self,
        x: ops.Activation,
        routing: ops.Routing,
        *,
        quant: ops.ActivationQuant[ops.Activation],
        by_token: bool = False,
    ) -> ops.Activation:
        """silu(gate) · up of that product, plain or as experts of that `activation_quant` read it."""
        return ops.grouped_gated_linear(x, self.weight, routing, quant, by_token=by_token)
