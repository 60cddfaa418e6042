"""Ranges of a stored tensor that a rank loads, along the axes that its format defines."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.nn.parallel import FIELD
from slipstream.nn.quant.method import StoredTensor


class Cut:
    """Slices a rank's shard of one stored tensor. whole, own: the stored shape of the layer and of the shard.

    rows, columns: features of the rank. Raises ConfigError if they end within a packed word, a block or a group.
    """

    def __init__(self, name: str, whole: StoredTensor, own: StoredTensor, rows: slice, columns: slice) -> None:
        self._whole, self._own, self._first_column = whole, own, columns.start
        self._ranges: list[tuple[int, slice]] = []
        for axis, unit, features in (
            (whole.rows_axis, whole.rows_unit, rows),
            (whole.columns_axis, whole.columns_unit, columns),
        ):
            if axis is None or whole.shape[axis] == own.shape[axis]:
                continue
            length = whole.shape[axis]
            start, stop = features.start // unit, -(-features.stop // unit)
            is_whole = features.start % unit == 0 and (features.stop % unit == 0 or stop == length)
            if not is_whole or stop - start != own.shape[axis]:
                reason = f"features {features.start} to {features.stop} of {name} do not begin and end with {unit}"
                raise ConfigError(FIELD, name, reason)
            self._ranges.append((axis, slice(start, stop)))

    def __call__(self, tensor: Tensor) -> Tensor:
        """Raises ValueError if the tensor's shape differs from that of the whole layer."""
        if self._whole.says_shape is not None and self._own.says_shape is not None:
            if tensor.tolist() != list(self._whole.says_shape):
                raise ValueError(f"says {tensor.tolist()}, config.json implies {list(self._whole.says_shape)}")
            return torch.tensor(self._own.says_shape)
        for axis, part in self._ranges:
            tensor = tensor.narrow(axis, part.start, part.stop - part.start)
        if self._ranges and self._whole.names_groups_of:
            tensor = tensor - self._first_column // self._whole.names_groups_of
        return tensor
