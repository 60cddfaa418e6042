"""WeightSlot: what the decoder expects of one tensor of a checkpoint, and what to do with it when it arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

FLOAT_DTYPES = ("F32", "F16", "BF16")  # as safetensors names them


@dataclass(frozen=True)
class WeightSlot:
    """shape, dtypes: what the file must hold. load: copies (converts, merges, packs) the tensor into its layer.

    load raises ValueError for contents that cannot be served. is_index, is_optional: as nn/quant/method.py says.
    num_rows: output features that it is of. rows_axis, columns_axis: as nn/quant/method.py says.
    says_shape: its contents, if they are the shape [rows, columns] of what is stored beside it.
    mean, std: the normal distribution that dummy weights are drawn from, so that activations keep their scale.
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
