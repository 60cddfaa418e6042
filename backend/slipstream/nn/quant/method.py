"""QuantMethod: how the weights of a linear layer are held and multiplied. Unquantised is one of the methods.

A method is stateless; the tensors it makes live in the layer's `weights` dictionary under names only the method knows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.registry import Registry
from slipstream.nn.spec import LinearSpec

Weights = dict[str, Tensor]


class QuantMethod(Protocol):
    """Order of calls: supports, create_weights, load for every tensor of every part, finish once, then apply."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """A reason against this device and this activation dtype, or None."""
        ...

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        """Uninitialised tensors for all parts of the layer, merged."""
        ...

    def checkpoint_shapes(self, spec: LinearSpec, rows: int) -> dict[str, tuple[int, ...]]:
        """What a checkpoint stores for a part of that many rows: suffix ("weight", "bias", …) -> shape."""
        ...

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        """Put one tensor of a part, which owns these rows of the merged layer, in its place."""
        ...

    def finish(self, weights: Weights) -> None:
        """All tensors of the layer are loaded: repack for the device. The largest temporary is one layer."""
        ...

    def apply(self, weights: Weights, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        ...


QUANT_METHODS: Registry[QuantMethod] = Registry("quantization")
