"""Deterministic mode's products: the weights as another method holds them, multiplied for each row alike.

Activations stay in the model's dtype, also where the method would quantise them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.fp8 import Fp8
from slipstream.nn.quant.int8 import Int8
from slipstream.nn.quant.method import CheckpointTensors, QuantMethod, Weights
from slipstream.nn.quant.unquantized import Unquantized
from slipstream.nn.stored_format import StoredFormat

ACCEPTED = ("none", "fp8", "wint8")  # one scale an output feature, or none


@dataclass(frozen=True)
class Invariant(QuantMethod):
    """A row's product does not depend on the other rows. held: reads and holds the weights; nothing is repacked."""

    held: Unquantized | Fp8 | Int8
    stored: StoredFormat | None = None

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return self.held.supports(device, dtype)

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        return self.held.create_weights(spec, device, dtype)

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        return self.held.checkpoint_tensors(spec, rows)

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        self.held.load(weights, suffix, rows, tensor)

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        """Weights stay as they were loaded."""
        values = weights["values"] if "values" in weights else weights["weight"]
        scales = weights.get("scales", weights.get("scale"))
        return ops.deterministic_weight(values.flatten(0, -2), scales, weights.get("bias"), num_experts=num_experts)


def invariant(name: str, method: QuantMethod) -> Invariant:
    """The method of that name for deterministic mode. Raises ConfigError if its weights are scaled otherwise."""
    if isinstance(method, (Unquantized, Fp8)) or (isinstance(method, Int8) and not method.int8_inputs):
        return Invariant(method, method.stored)
    reason = f"{name} has no product whose rows do not depend on each other; accepted: {', '.join(ACCEPTED)}"
    raise ConfigError("quantization", name, f"deterministic: {reason}")


def is_unquantized(method: QuantMethod) -> bool:
    """Whether its weights are a checkpoint's own, so that a tied head may multiply by the embedding table."""
    return isinstance(method.held if isinstance(method, Invariant) else method, Unquantized)
