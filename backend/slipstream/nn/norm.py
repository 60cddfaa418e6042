"""RMSNorm with its weight and the fused residual addition."""

from __future__ import annotations

from typing import TypeVar

import torch
from slipstream_kernels.gemm.activation_quant import PLAIN, Activation, ActivationQuant
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.weight_slot import WeightSlot

A = TypeVar("A", bound=Activation)


class RMSNorm:
    """y = x / rms(x) · weight over the last dimension, in the form its reader asks for. Source: arXiv:1910.07467."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        self.weight = torch.empty(size, device=context.device, dtype=context.dtype)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return PLAIN.rms_norm(x, self.weight, self.eps, None)[0]

    def add(self, x: Tensor, residual: Tensor | None, form: ActivationQuant[A]) -> tuple[A, Tensor]:
        """(norm(x + residual), x + residual); without a residual, (norm(x), x)."""
        return form.rms_norm(x, self.weight, self.eps, residual)

    def slot(self) -> WeightSlot:
        return WeightSlot(tuple(self.weight.shape), self._load, mean=1.0, std=0.0, rows_axis=0)

    def _load(self, tensor: Tensor) -> None:
        self.weight.copy_(tensor)
