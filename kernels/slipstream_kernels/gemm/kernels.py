"""The kernels of dense products: what each refuses, which of its variants it takes, and how it is called.

Choices are made in gemm/choose.py and tuning.py.  Rows come as the weight's format takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda import swap_ab_choice, swap_ab_stream_choice
from slipstream_kernels.gemm.int4_checks import group_refusal, write_out_refusal
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product
from slipstream_kernels.gemm.tuning import ranges_of, tuning_of
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.kernel_choice import Config, Device, Kernel, always, never
from slipstream_kernels.select import load_module, select

if TYPE_CHECKING:
    from slipstream_kernels.gemm.linear_weight import LinearWeight

Rows = Tensor | Fp8Rows | Int8Rows
Run = Callable[[Rows, "LinearWeight", Config, bool], Tensor]  # of rows, weight, template arguments, whether gated
LIBRARY_ALIGNMENT = 16  # features of an e4m3 weight that cuBLAS takes are multiples of it
BOTH_HALVES = 32  # output features of a gated product in tiles of 16 are multiples of it


def _cuda(name: str) -> ModuleType:
    return load_module("cuda", f"gemm.{name}")


def _bias(weight: LinearWeight, dtype: torch.dtype) -> Tensor | None:
    return None if weight.bias is None else weight.bias.to(dtype)


def _aligned(x: Rows) -> Tensor:
    """Plain rows that begin at multiples of 16 bytes."""
    assert isinstance(x, Tensor)
    if x.stride(0) * x.itemsize % 16 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _needs_gpu(product: Product) -> str | None:
    device = product.weight.device
    return None if device.type == "cuda" else f"the weight is on {device}"


def _needs_16_bits(product: Product) -> str | None:
    if product.dtype in (torch.bfloat16, torch.float16):
        return None
    return f"rows are {product.dtype}, not bfloat16 or float16"


def _in_pairs_of_tiles(product: Product) -> bool:
    return product.weight.out_features % BOTH_HALVES == 0


# skinny_gemm


def _skinny_refusal(product: Product) -> str | None:
    weight = product.weight
    row_bytes, by_blocks = weight.in_features * weight.dtype.itemsize, weight.format == "fp8_block"
    if weight.dtype == torch.int32:
        row_bytes = weight.in_features
    sizes = weight.device, product.dtype, weight.dtype, row_bytes, by_blocks
    reason: str | None = _cuda("skinny_gemm").product_refusal(*sizes, product.num_rows)
    return reason


def _skinny_config(product: Product, device: Device[Product]) -> Config:
    units = product.weight.out_features // 2 if product.gated else product.weight.out_features
    chosen: Config = _cuda("skinny_gemm").choose(
        product.num_rows, units, product.weight.in_features, product.gated, device.num_sms
    )
    return chosen


def _skinny(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    kernel = _cuda("skinny_gemm")
    y: Tensor = kernel.skinny_gemm(
        _aligned(x), weight.tensor, weight.scales, _bias(weight, x.dtype), gated, kernel.Variant(*config)
    )
    return y


# swap_ab_gemm


def _swap_ab_refusal(product: Product) -> str | None:
    weight = product.weight
    sizes = weight.device, product.dtype, weight.dtype, weight.out_features, weight.in_features
    reason: str | None = _cuda("swap_ab_gemm").product_refusal(*sizes)
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
    weight, kernel = product.weight, _cuda("swap_ab_gemm")
    kind = product.dtype, weight.dtype, weight.format == "fp8_block"
    ranges = ranges_of(torch.cuda.get_device_name(weight.device), weight.format, "swap_ab_gemm")
    kernel.build_all(*kind, tuple(swap_ab_choice.columns_of(ranges)))
    count: int = kernel.count_clusters(weight.device, *kind, kernel.Variant(*config), product.gated)
    return count


def _swap_ab(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert not isinstance(x, Int8Rows)
    kernel = _cuda("swap_ab_gemm")
    rows = _aligned(x) if isinstance(x, Tensor) else x
    y: Tensor = kernel.swap_ab_gemm(
        rows, weight.tensor, weight.scales, _bias(weight, x.dtype), gated, kernel.Variant(*config)
    )
    return y


# swap_ab_stream


def _stream_refusal(product: Product) -> str | None:
    weight = product.weight
    sizes = weight.device, product.dtype, weight.out_features, weight.in_features
    reason: str | None = _cuda("swap_ab_stream").product_refusal(*sizes)
    return reason


def _stream_config(product: Product, device: Device[Product]) -> Config | None:
    sizes, tuning = _sizes(product), tuning_of(device.name)
    columns = swap_ab_stream_choice.columns_for(product.num_rows)
    most_ctas = device.count_clusters("swap_ab_stream", product, (columns,))
    return swap_ab_stream_choice.choose(sizes, most_ctas, tuning.stream)


def _stream_ctas(product: Product, config: Config) -> int:
    kernel = _cuda("swap_ab_stream")
    kernel.build_all()
    count: int = kernel.count_ctas(product.weight.device, *config)
    return count


def _stream(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Fp8Rows) and weight.scales is not None and not gated
    kernel = _cuda("swap_ab_stream")
    y: Tensor = kernel.swap_ab_stream(
        x, weight.tensor, weight.scales, _bias(weight, x.dtype), kernel.Plan(*config), weight.counters
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
    return hopper_refusal(product.weight.device, "the weight is") or _needs_16_bits(product)


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
    return _needs_gpu(product) or group_refusal(product.weight.group_size, product.weight.in_features)


def _int4_write_out_refusal(product: Product) -> str | None:
    return _needs_gpu(product) or _needs_16_bits(product) or write_out_refusal(product.weight.group_size)


def _dequantise(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    y: Tensor = load_module("reference", "gemm.skinny_gemm").skinny_gemm(
        x, weight.tensor, weight.scales, weight.bias, gated
    )
    return y


def _invariant(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    y: Tensor = select("gemm.invariant_mm", "auto", x).invariant_mm(x, weight.tensor, weight.scales, weight.bias)
    return y


# int8 weights


def _int8_gemm_refusal(product: Product) -> str | None:
    weight = product.weight
    reason: str | None = _cuda("int8_gemm").product_refusal(
        weight.device, product.dtype, (weight.out_features, weight.in_features)
    )
    return reason


def _tile_config(name: str) -> Callable[[Product, Device[Product]], Config]:
    def configure(product: Product, device: Device[Product]) -> Config:
        tiles = _cuda(name).TILES
        tile = _cuda("cutlass_gemm").choose_tile(tiles, product.num_rows, product.weight.out_features, device.num_sms)
        sizes: Config = tile[:3]
        return sizes

    return configure


def _int8_gemm(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    y: Tensor = _cuda("int8_gemm").int8_gemm(x, weight.tensor, weight.scales, weight.bias)
    return y


def _mixed(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    kernel = _cuda("mixed_gemm")
    y: Tensor = kernel.mixed_gemm(
        _aligned(x), weight.tensor, weight.scales, _bias(weight, x.dtype), gated, kernel.Variant(*config)
    )
    return y


def _int8_written_out(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    expand = load_module("triton", "gemm.int8_dequantise").int8_dequantise
    return F.linear(x, expand(weight.tensor, weight.scales, x.dtype), _bias(weight, x.dtype))


# 4-bit weights


def _int4_by(name: str) -> Run:
    def run(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
        assert isinstance(x, Tensor)
        rows = _aligned(x)
        y: Tensor = getattr(_cuda("int4_mm"), name)(rows, weight.int4, _bias(weight, x.dtype), gated, config)
        return y

    return run


def _int4_canonical_written_out(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    expand = load_module("triton", "gemm.int4_dequantise").int4_dequantise
    return F.linear(x, expand(weight.int4, x.dtype), _bias(weight, x.dtype))


def _w4a8_by(name: str) -> Run:
    def run(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
        y: Tensor = getattr(_cuda("w4a8_mm"), name)(x, weight.int4, _bias(weight, x.dtype), config)
        return y

    return run


def _w4a8_many_refusal(product: Product) -> str | None:
    reason: str | None = _cuda("w4a8_mm").many_rows_refusal(product.dtype)
    return reason


def _mixed_gemm(name: str, run: Run, gates: Callable[[Product], bool] = never) -> Kernel[Product, Run]:
    """A format of the mixed GEMM; gemm/cuda/<name>.py has its libraries and the choice of its variant."""

    def configure(product: Product, device: Device[Product]) -> Config | None:
        weight = product.weight
        chosen: Config | None = _cuda(name).choose(
            product.num_rows,
            (weight.out_features, weight.in_features),
            lambda found: device.count_clusters(name, product, found),
            tuning_of(device.name),
        )
        return chosen

    def count_clusters(product: Product, config: Config) -> int:
        kernel, weight = _cuda(name), product.weight
        weight_format = kernel.format_of(product.dtype, int4_layout.groups_per_block(weight.group_size))
        count: int = kernel.clusters_at_once(weight.device, weight_format, kernel.Variant(*config))
        return count

    return Kernel(run, _needs_16_bits, configure, gates, count_clusters)


KERNELS: Mapping[str, Kernel[Product, Run]] = {
    "skinny_gemm": Kernel(_skinny, _skinny_refusal, _skinny_config, always),
    "swap_ab_gemm": Kernel(_swap_ab, _swap_ab_refusal, _swap_ab_config, always, _swap_ab_clusters),
    "swap_ab_stream": Kernel(_stream, _stream_refusal, _stream_config, never, _stream_ctas),
    "library": Kernel(_library, _library_refusal),
    "library_split": Kernel(_library_split, _library_split_refusal),
    "onednn": Kernel(_onednn),
    "scaled_mm": Kernel(_scaled_by("triton"), _needs_gpu),
    "int8_mm": Kernel(_scaled_by("triton"), _needs_gpu),
    "int4_mm": Kernel(_scaled_by("triton"), _int4_triton_refusal),
    "reference": Kernel(_scaled_by("reference")),
    "cpu": Kernel(_scaled_by("cpu"), _cpu_refusal),
    "dequantise": Kernel(_dequantise, gates=always),
    "invariant_mm": Kernel(_invariant),
    "int8_gemm": Kernel(_int8_gemm, _int8_gemm_refusal, _tile_config("int8_gemm")),
    "mixed_gemm": _mixed_gemm("mixed_gemm", _mixed, _in_pairs_of_tiles),
    "int8_dequantise+library": Kernel(_int8_written_out),
    "skinny_gemm_w4a16": Kernel(_int4_by("rows"), _needs_16_bits, gates=_in_pairs_of_tiles),
    "mixed_gemm_w4a16": _mixed_gemm("mixed_gemm_w4a16", _int4_by("mixed")),
    "int4_dequantise+library": Kernel(_int4_by("written_out"), _needs_16_bits),
    "int4_canonical_dequantise+library": Kernel(_int4_canonical_written_out, _int4_write_out_refusal),
    "mixed_gemm_w4a8": _mixed_gemm("mixed_gemm_w4a8", _w4a8_by("few")),
    "w4a8_gemm": Kernel(_w4a8_by("many"), _w4a8_many_refusal, _tile_config("w4a8_gemm")),
    "mixed_gemm_w4a8_parts": Kernel(_w4a8_by("in_parts"), _needs_16_bits),
}
