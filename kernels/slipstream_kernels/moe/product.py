"""Products of experts as data; weights are described as in gemm/product.py."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.gemm.product import WeightKind


class Product(NamedTuple):
    """num_tokens, num_rows: as Routing.sizes has them.  dtype: of the rows before they are quantised."""

    weight: WeightKind
    num_tokens: int
    num_rows: int
    dtype: torch.dtype
    gated: bool = False
