"""The kernels of dense products: what each refuses, which of its variants it takes, and how it is called.

Choices are made in gemm/choose.py and tuning.py.  Rows come as the weight's format takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm.cuda import swap_ab_choice, swap_ab_stream_choice
from slipstream_kernels.gemm.int4_checks import group_refusal
from slipstream_kernels.gemm.integer_kernels import INTEGER_KERNELS
from slipstream_kernels.gemm.kernel_rules import Rows, Run, aligned, bias_of, in_cuda, needs_16_bits, needs_gpu
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product
from slipstream_kernels.gemm.tuning import ranges_of, tuning_of
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.kernel_choice import Config, Device, Kernel, always, never
from slipstream_kernels.select import load_module, select

if TYPE_CHECKING:
    from slipstream_kernels.gemm.linear_weight import LinearWeight

LIBRARY_ALIGNMENT = 16  # features of an e4m3 weight that cuBLAS takes are multiples of it


# skinny_gemm


def _skinny_refusal(product: Product) -> str | None:
    weight = product.weight
    row_bytes, by_blocks = weight.in_features * weight.dtype.itemsize, weight.format == "fp8_block"
    if weight.dtype == torch.int32:
        row_bytes = weight.in_features
    sizes = weight.device, product.dtype, weight.dtype, row_bytes, by_blocks
    reason: str | None = in_cuda("skinny_gemm").product_refusal(*sizes, product.num_rows)
    return reason


def _skinny_config(product: Product, device: Device[Product]) -> Config:
    units = product.weight.out_features // 2 if product.gated else product.weight.out_features
    chosen: Config = in_cuda("skinny_gemm").choose(
        product.num_rows, units, product.weight.in_features, product.gated, device.num_sms
    )
    return chosen


def _skinny(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    kernel = in_cuda("skinny_gemm")
    y: Tensor = kernel.skinny_gemm(
        aligned(x), weight.tensor, weight.scales, bias_of(weight, x.dtype), gated, kernel.Variant(*config)
    )
    return y


# swap_ab_gemm


def _swap_ab_refusal(product: Product) -> str | None:
    weight = product.weight
    sizes = weight.device, product.dtype, weight.dtype, weight.out_features, weight.in_features
    reason: str | None = in_cuda("swap_ab_gemm").product_refusal(*sizes)
    return reason


def _sizes(product: Product) -> swap_ab_choice.Product:
    weight = product.weight
    row_bytes = weight.in_features * weight.dtype.itemsize
    return swap_ab_choice.Product(product.num_rows, weight.out_features, row_bytes, product.gated)


def _swap_ab_config(product: Product, device: Device[Product]) -> Config:
    tuning = tuning_of(device.name)
    costs = tuning.swap_ab_fp8 if product.weight.format == "fp8" else tuning.swap_ab
    return swap_ab_choice.choose(_sizes(product), partial(device.count_clusters, "swap_ab_gemm", product), costs)


def _swap_ab_clusters(product: Product, config: Config) -> int:
    weight, kernel = product.weight, in_cuda("swap_ab_gemm")
    kind = product.dtype, weight.dtype, weight.format == "fp8_block"
    ranges = ranges_of(torch.cuda.get_device_name(weight.device), weight.format, "swap_ab_gemm")
    kernel.build_all(*kind, tuple(swap_ab_choice.columns_of(ranges)))
    count: int = kernel.count_clusters(weight.device, *kind, kernel.Variant(*config), product.gated)
    return count


def _swap_ab(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert not isinstance(x, Int8Rows)
    kernel = in_cuda("swap_ab_gemm")
    rows = aligned(x) if isinstance(x, Tensor) else x
    y: Tensor = kernel.swap_ab_gemm(
        rows, weight.tensor, weight.scales, bias_of(weight, x.dtype), gated, kernel.Variant(*config)
    )
    return y


# swap_ab_stream


def _stream_refusal(product: Product) -> str | None:
    weight = product.weight
    sizes = weight.device, product.dtype, weight.out_features, weight.in_features
    reason: str | None = in_cuda("swap_ab_stream").product_refusal(*sizes)
    return reason


def _stream_config(product: Product, device: Device[Product]) -> Config | None:
    sizes, tuning = _sizes(product), tuning_of(device.name)
    columns = swap_ab_stream_choice.columns_for(product.num_rows)
    most_ctas = device.count_clusters("swap_ab_stream", product, (columns,))
    return swap_ab_stream_choice.choose(sizes, most_ctas, tuning.stream)


def _stream_ctas(product: Product, config: Config) -> int:
    kernel = in_cuda("swap_ab_stream")
    kernel.build_all()
    count: int = kernel.count_ctas(product.weight.device, *config)
    return count


def _stream(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Fp8Rows) and weight.scales is not None and not gated
    kernel = in_cuda("swap_ab_stream")
    y: Tensor = kernel.swap_ab_stream(
        x, weight.tensor, weight.scales, bias_of(weight, x.dtype), kernel.Plan(*config), weight.counters
    )
    return y


# products of the library, in Triton-lang and in plain torch


def _library_refusal(product: Product) -> str | None:
    if product.rows == PLAIN_ROWS:
        return None
    weight = product.weight
    if weight.out_features % LIBRARY_ALIGNMENT or weight.in_features % LIBRARY_ALIGNMENT:
        return f"the weight's features are not multiples of {LIBRARY_ALIGNMENT}"
    # Which scales of rows and blocks cuBLAS takes differs from one generation of GPUs to the next.
    return hopper_refusal(weight.device, "the weight is")


def _library(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    if isinstance(x, Tensor):
        return F.linear(x, weight.tensor, weight.bias)
    assert isinstance(x, Fp8Rows) and weight.scales is not None
    y: Tensor = load_module("library", "gemm.scaled_mm").scaled_mm(
        x, weight.tensor, weight.scales, weight.bias, weight.counters
    )
    return y


def _library_split_refusal(product: Product) -> str | None:
    return hopper_refusal(product.weight.device, "the weight is") or needs_16_bits(product)


def _library_split(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    """By cuBLAS's older interface: its heuristics split long sums of 129 to 256 rows; those of cuBLASLt do not."""
    assert isinstance(x, Tensor)
    preferred = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublas")
    try:
        return F.linear(x, weight.tensor, weight.bias)
    finally:
        torch.backends.cuda.preferred_blas_library(preferred)


def _onednn(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.tensor, weight.bias, "none", [], "")
    return y


def _scaled_by(backend: str) -> Run:
    """Products of canonical weights by the version of that backend."""

    def run(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
        y: Tensor
        if weight.kind.dtype == E4M3:
            module = load_module(backend, "gemm.scaled_mm")
            y = module.scaled_mm(x, weight.tensor, weight.scales, weight.bias, weight.counters)
        elif weight.kind.format == "int8":
            module = load_module(backend, "gemm.int8_mm")
            y = module.int8_mm(x, weight.tensor, weight.scales, weight.bias, weight.counters)
        else:
            y = load_module(backend, "gemm.int4_mm").int4_mm(x, weight.int4, weight.bias)
        return y

    return run


def _cpu_refusal(product: Product) -> str | None:
    reason: str | None = load_module("cpu", "gemm.refusal").refusal(product.weight)
    return reason


def _int4_triton_refusal(product: Product) -> str | None:
    return needs_gpu(product) or group_refusal(product.weight.group_size, product.weight.in_features)


def _dequantise(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    y: Tensor = load_module("reference", "gemm.skinny_gemm").skinny_gemm(
        x, weight.tensor, weight.scales, weight.bias, gated
    )
    return y


def _invariant(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    y: Tensor = select("gemm.invariant_mm", "auto", x).invariant_mm(x, weight.tensor, weight.scales, weight.bias)
    return y


KERNELS: Mapping[str, Kernel[Product, Run]] = {
    "skinny_gemm": Kernel(_skinny, _skinny_refusal, _skinny_config, always),
    "swap_ab_gemm": Kernel(_swap_ab, _swap_ab_refusal, _swap_ab_config, always, _swap_ab_clusters),
    "swap_ab_stream": Kernel(_stream, _stream_refusal, _stream_config, never, _stream_ctas),
    "library": Kernel(_library, _library_refusal),
    "library_split": Kernel(_library_split, _library_split_refusal),
    "onednn": Kernel(_onednn),
    "scaled_mm": Kernel(_scaled_by("triton"), needs_gpu),
    "int8_mm": Kernel(_scaled_by("triton"), needs_gpu),
    "int4_mm": Kernel(_scaled_by("triton"), _int4_triton_refusal),
    "reference": Kernel(_scaled_by("reference")),
    "cpu": Kernel(_scaled_by("cpu"), _cpu_refusal),
    "dequantise": Kernel(_dequantise, gates=always),
    "invariant_mm": Kernel(_invariant),
    **INTEGER_KERNELS,
}
