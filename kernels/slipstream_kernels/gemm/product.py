"""Products as data: what a weight is, what a product is, and which kernel makes it.  Knows sizes only, no values."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class Variant(NamedTuple):
    """A kernel and its template arguments.  is_gated: it applies the gate as well."""

    kernel: str
    config: tuple[int, ...] = ()
    is_gated: bool = False

    def __str__(self) -> str:
        numbers = ",".join(str(int(number)) for number in self.config)
        return f"{self.kernel}/{numbers}" if numbers else self.kernel


class Device(Protocol):
    """What a choice depends on beside the product.  name: by which gemm/tuning.py finds its table."""

    name: str
    num_sms: int

    def refusal(self, kernel: str, product: Product) -> str | None:
        """Why the kernel cannot make the product here; None if it can."""
        ...

    def count_clusters(self, kernel: str, product: Product, config: tuple[int, ...]) -> int:
        """How many clusters of CTAs of a kernel's variant run at once; 0: it cannot run."""
        ...
