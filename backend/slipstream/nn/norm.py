"""RMSNorm with its weight; the residual addition is fused into it."""

from __future__ import annotations

from typing import cast

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.placement import Placement
from slipstream.nn.tensor_slot import TensorSlot


class RMSNorm:
    """y = x / rms(x) · weight over the last dimension. Source: arXiv:1910.07467."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = torch.empty(size, device=placement.device, dtype=placement.dtype)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return cast("Tensor", ops.rms_norm(x, self.weight, self.eps))

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return cast("tuple[Tensor, Tensor]", ops.rms_norm(x, self.weight, self.eps, residual))

    def slot(self) -> TensorSlot:
        return TensorSlot(tuple(self.weight.shape), self._load, mean=1.0, std=0.0)

    def _load(self, tensor: Tensor) -> None:
        self.weight.copy_(tensor)
