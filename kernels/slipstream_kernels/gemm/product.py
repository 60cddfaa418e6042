"""Products as data: what a weight is, and what a product is.  Knows sizes only, no values."""

from __future__ import annotations

from typing import NamedTuple

import torch

PLAIN_ROWS, FP8_ROWS, INT8_ROWS = "plain", "fp8", "int8"


class WeightKind(NamedTuple):
    """What a weight is, as far as it decides how it is multiplied.  Layers of one shape share a kind.

    format: of its values; the keys of gemm/tuning.py and moe/tuning.py name them all.  out_features: of one expert.
    group_size: input features that share a scale; 0: one scale a row, or none.  rows: how its input is quantised.
    num_experts: 0 for a dense layer.  deterministic: a row of the result must not depend on the other rows.
    """

    format: str
    out_features: int
    in_features: int
    dtype: torch.dtype
    device: torch.device
    group_size: int = 0
    rows: str = PLAIN_ROWS
    num_experts: int = 0
    deterministic: bool = False


class Product(NamedTuple):
    """rows: in which form they come.  dtype: of plain rows, and of the result.

    gated: silu(first half of the columns) * second half is wanted.
    """

    weight: WeightKind
    num_rows: int
    rows: str
    dtype: torch.dtype
    gated: bool = False
