"""What the descriptions of dense kernels share: how they are called, and the rules of several of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.product import Product
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.kernel_choice import Config
from slipstream_kernels.select import load_module

if TYPE_CHECKING:
    from slipstream_kernels.gemm.linear_weight import LinearWeight

Rows = Tensor | Fp8Rows | Int8Rows
Run = Callable[[Rows, "LinearWeight", Config, bool], Tensor]  # of rows, weight, template arguments, whether gated
BOTH_HALVES = 32  # output features of a gated product in tiles of 16 are multiples of it


def in_cuda(name: str) -> ModuleType:
    return load_module("cuda", f"gemm.{name}")


def bias_of(weight: LinearWeight, dtype: torch.dtype) -> Tensor | None:
    return None if weight.bias is None else weight.bias.to(dtype)


def aligned(x: Rows) -> Tensor:
    """Plain rows that begin at multiples of 16 bytes."""
    assert isinstance(x, Tensor)
    if x.stride(0) * x.itemsize % 16 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def needs_gpu(product: Product) -> str | None:
    device = product.weight.device
    return None if device.type == "cuda" else f"the weight is on {device}"


def needs_16_bits(product: Product) -> str | None:
    if product.dtype in (torch.bfloat16, torch.float16):
        return None
    return f"rows are {product.dtype}, not bfloat16 or float16"


def in_pairs_of_tiles(product: Product) -> bool:
    return product.weight.out_features % BOTH_HALVES == 0
