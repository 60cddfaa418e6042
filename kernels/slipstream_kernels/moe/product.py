"""Products of experts as data; weights are described as in gemm/product.py."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from slipstream_kernels.gemm.product import WeightKind


class Product(NamedTuple):
    """num_rows: pairs of a token and one of its experts.  dtype: of the rows before they are quantised."""

    weight: WeightKind
    num_tokens: int
    num_rows: int
    dtype: torch.dtype
    gated: bool = False


class Variant(NamedTuple):
    """A kernel and its template arguments.  quantises: rows are quantised first."""

    kernel: str
    config: tuple[int, ...] = ()
    quantises: bool = False

    def __str__(self) -> str:
        numbers = ",".join(str(int(number)) for number in self.config)
        return f"{self.kernel}/{numbers}" if numbers else self.kernel


class Device(Protocol):
    """As gemm/product.py has it."""

    name: str
    num_sms: int

    def refusal(self, kernel: str, product: Product) -> str | None: ...
