"""RMSNorm with its weight and the fused residual addition."""

from __future__ import annotations

from typing import TypeVar

import torch
from slipstream_kernels.ops import PLAIN, Activation, ActivationQuant
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


class SharedRMSNorm(RMSNorm):
    """RMSNorm over features that ranks share: the mean is that of all. unit: features that stay together."""

    def __init__(self, size: int, unit: int, eps: float, context: LayerContext) -> None:
        self._size, self._parallel = size, context.parallel
        self._own = context.parallel.repeated_range_of("norm", size, unit)
        super().__init__(self._own.stop - self._own.start, eps, context)
        self._num_summed = len(self.weight) * context.parallel.size  # units that several ranks hold count as often

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = self._parallel.sum(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self._num_summed + self.eps)).to(x.dtype) * self.weight

    def slot(self) -> WeightSlot:
        return WeightSlot((self._size,), self._load, mean=1.0, std=0.0, rows_axis=0)

    def _load(self, tensor: Tensor) -> None:
        self.weight.copy_(tensor[self._own])
