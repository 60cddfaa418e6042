"""Vector: numbers that a layer stores beside its products and norms, such as the bias that ranks experts."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.weight_slot import WeightSlot


class Vector:
    """values: [own numbers] fp32 for any model dtype, because they are added to fp32 values."""

    def __init__(self, size: int, context: LayerContext, own: slice = slice(None)) -> None:
        """own: the part of the stored vector that this rank has."""
        self._size, self._own = size, own
        self.values = torch.zeros(len(range(size)[own]), device=context.device)

    def slot(self) -> WeightSlot:
        return WeightSlot((self._size,), self._load, rows_axis=0)

    def _load(self, tensor: Tensor) -> None:
        self.values.copy_(tensor[self._own])
