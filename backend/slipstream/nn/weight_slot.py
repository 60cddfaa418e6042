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
    mean, std: the normal distribution that dummy weights are drawn from, so that activations keep their scale.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    mean: float = 0.0
    std: float = 0.02
    is_index: bool = False
    is_optional: bool = False
