"""WeightSlot: the expected shape and dtype of one tensor of a checkpoint, and how to load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

FLOAT_DTYPES = ("F32", "F16", "BF16")  # as safetensors names them
SELECTION_BIAS = "e_score_correction_bias"  # suffix of the bias that ranks experts


@dataclass(frozen=True)
class WeightSlot:
    """shape, dtypes: required of the file. load: copies (converts, merges, packs) the tensor into its layer.

    load raises ValueError for unsupported contents. is_index, is_optional, rows_axis, columns_axis: see
    nn/quant/method.py. num_rows: its number of output features.
    says_shape: the expected contents of a tensor that stores the shape [rows, columns] of its neighbour.
    mean, std: the normal distribution of dummy weights, which keeps the scale of activations.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    mean: float = 0.0
    std: float = 0.02
    is_index: bool = False
    is_optional: bool = False
    num_rows: int = 1
    rows_axis: int | None = None
    columns_axis: int | None = None
    says_shape: tuple[int, int] | None = None


def long_axes(shape: tuple[int, ...]) -> list[int]:
    """Axes longer than 1: scalar scales are stored as [], [1] or [1, 1], channel scales as a column or a row."""
    return [size for size in shape if size != 1]
