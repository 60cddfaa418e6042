"""The kernels of dense products: what each refuses, which of its variants it takes, and how it is called.

Choices are made in gemm/choose.py and tuning.py.  Rows come as the weight's format takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm.cuda import mixed_gemm_w4a8_choice, swap_ab_choice
from slipstream_kernels.gemm.int4_checks import group_refusal
from slipstream_kernels.gemm.product import PLAIN_ROWS, Device, Product
from slipstream_kernels.gemm.tuning import ranges_of, tuning_of
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.select import load_module, select

if TYPE_CHECKING:
    from slipstream_kernels.gemm.linear_weight import LinearWeight

Config = tuple[int, ...]
Rows = Tensor | Fp8Rows | Int8Rows
LIBRARY_ALIGNMENT = 16  # features of an e4m3 weight that cuBLAS takes are multiples of it
BLOCK = 128  # input features that kernels of 4-bit weights take at once, in one group or two
BOTH_HALVES = 32  # output features of a gated product in strips of 16 are multiples of it


def _never(product: Product) -> bool:
    return False


def _always(product: Product) -> bool:
    return True


def _none(product: Product) -> None:
    return None


@dataclass(frozen=True)
class Kernel:
    """run: (rows, weight, config, gated) -> the result.  refusal: why a product cannot be made, or None.

    configure: the template arguments of a product; None: there are none for it.  gates: whether it applies the gate of
    such a product.  count_clusters: as Device has it.
    """

    run: Callable[[Rows, LinearWeight, Config, bool], Tensor]
    refusal: Callable[[Product], str | None] = _none
    configure: Callable[[Product, Device], Config | None] = lambda product, device: ()
    gates: Callable[[Product], bool] = _never
    count_clusters: Callable[[Product, Config], int] = lambda product, config: 0


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


def _in_pairs_of_strips(product: Product) -> bool:
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


def _skinny_config(product: Product, device: Device) -> Config:
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


def _swap_ab_config(product: Product, device: Device) -> Config:
    weight = product.weight
    row_bytes = weight.in_features * weight.dtype.itemsize
    sized = swap_ab_choice.Product(product.num_rows, weight.out_features, row_bytes, product.gated)
    costs = tuning_of(device.name).swap_ab
    return swap_ab_choice.choose(sized, lambda found: device.count_clusters("swap_ab_gemm", product, found), costs)


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


# products of the library, in Triton-lang and in plain torch


def _library_refusal(product: Product) -> str | None:
    if product.rows == PLAIN_ROWS:
        return None
    weight = product.weight
    if weight.out_features % LIBRARY_ALIGNMENT or weight.in_features % LIBRARY_ALIGNMENT:
        return f"the weight's features are not multiples of {LIBRARY_ALIGNMENT}"
    return _needs_gpu(product)


def _library(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    if isinstance(x, Tensor):
        return F.linear(x, weight.tensor, weight.bias)
    assert isinstance(x, Fp8Rows) and weight.scales is not None
    y: Tensor = load_module("library", "gemm.scaled_mm").scaled_mm(
        x, weight.tensor, weight.scales, weight.bias, weight.counters
    )
    return y


def _onednn(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.tensor, weight.bias, "none", [], "")
    return y


def _scaled_by(backend: str) -> Callable[[Rows, LinearWeight, Config, bool], Tensor]:
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


def _int4_triton_refusal(product: Product) -> str | None:
    return _needs_gpu(product) or group_refusal(product.weight.group_size, product.weight.in_features)


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


def _tile_config(name: str) -> Callable[[Product, Device], Config]:
    def configure(product: Product, device: Device) -> Config:
        tiles = _cuda(name).TILES
        tile = _cuda("cutlass_gemm").choose_tile(tiles, product.num_rows, product.weight.out_features, device.num_sms)
        sizes: Config = tile[:3]
        return sizes

    return configure


def _int8_gemm(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    y: Tensor = _cuda("int8_gemm").int8_gemm(x, weight.tensor, weight.scales, weight.bias)
    return y


def _mixed_config(product: Product, device: Device) -> Config:
    weight = product.weight
    chosen: Config = _cuda("mixed_gemm").choose(
        product.num_rows,
        (weight.out_features, weight.in_features),
        lambda found: device.count_clusters("mixed_gemm", product, found),
        tuning_of(device.name),
    )
    return chosen


def _mixed_clusters(product: Product, config: Config) -> int:
    kernel = _cuda("mixed_gemm")
    count: int = kernel.clusters_at_once(product.weight.device, product.dtype, kernel.Variant(*config))
    return count


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


def _int4_by(name: str) -> Callable[[Rows, LinearWeight, Config, bool], Tensor]:
    def run(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
        assert isinstance(x, Tensor)
        rows = _aligned(x)
        y: Tensor = getattr(_cuda("int4_mm"), name)(rows, weight.int4, _bias(weight, x.dtype), gated, config)
        return y

    return run


def _w4a16_config(product: Product, device: Device) -> Config | None:
    weight = product.weight
    chosen: Config | None = _cuda("mixed_gemm_w4a16").choose(
        product.num_rows,
        (weight.out_features, weight.in_features),
        lambda found: device.count_clusters("mixed_gemm_w4a16", product, found),
        tuning_of(device.name),
    )
    return chosen


def _w4a16_clusters(product: Product, config: Config) -> int:
    kernel, weight = _cuda("mixed_gemm_w4a16"), product.weight
    groups = 2 if weight.group_size == BLOCK // 2 else 1
    count: int = kernel.clusters_at_once(weight.device, product.dtype, groups, kernel.Variant(*config))
    return count


def _w4a8_config(product: Product, device: Device) -> Config | None:
    weight = product.weight
    return mixed_gemm_w4a8_choice.choose(
        product.num_rows,
        (weight.out_features, weight.in_features),
        lambda found: device.count_clusters("mixed_gemm_w4a8", product, found),
        tuning_of(device.name),
    )


def _w4a8_clusters(product: Product, config: Config) -> int:
    weight = product.weight
    groups = 2 if weight.group_size == BLOCK // 2 else 1
    variant = mixed_gemm_w4a8_choice.Variant(*config)
    count: int = _cuda("mixed_gemm_w4a8").clusters_at_once(weight.device, groups, variant)
    return count


def _w4a8_by(name: str) -> Callable[[Rows, LinearWeight, Config, bool], Tensor]:
    def run(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
        y: Tensor = getattr(_cuda("w4a8_mm"), name)(x, weight.int4, _bias(weight, x.dtype), config)
        return y

    return run


def _w4a8_many_refusal(product: Product) -> str | None:
    reason: str | None = _cuda("w4a8_mm").many_rows_refusal(product.dtype)
    return reason


KERNELS: Mapping[str, Kernel] = {
    "skinny_gemm": Kernel(_skinny, _skinny_refusal, _skinny_config, _always),
    "swap_ab_gemm": Kernel(_swap_ab, _swap_ab_refusal, _swap_ab_config, _always, _swap_ab_clusters),
    "library": Kernel(_library, _library_refusal),
    "onednn": Kernel(_onednn),
    "scaled_mm": Kernel(_scaled_by("triton"), _needs_gpu),
    "int8_mm": Kernel(_scaled_by("triton"), _needs_gpu),
    "int4_mm": Kernel(_scaled_by("triton"), _int4_triton_refusal),
    "reference": Kernel(_scaled_by("reference")),
    "dequantise": Kernel(_dequantise, gates=_always),
    "invariant_mm": Kernel(_invariant),
    "int8_gemm": Kernel(_int8_gemm, _int8_gemm_refusal, _tile_config("int8_gemm")),
    "mixed_gemm": Kernel(_mixed, _needs_16_bits, _mixed_config, _in_pairs_of_strips, _mixed_clusters),
    "int8_dequantise+library": Kernel(_int8_written_out),
    "int4_rows": Kernel(_int4_by("rows"), _needs_16_bits, gates=_in_pairs_of_strips),
    "mixed_gemm_w4a16": Kernel(_int4_by("mixed"), _needs_16_bits, _w4a16_config, count_clusters=_w4a16_clusters),
    "int4_dequantise+library": Kernel(_int4_by("written_out"), _needs_16_bits),
    "mixed_gemm_w4a8": Kernel(_w4a8_by("few"), _needs_16_bits, _w4a8_config, count_clusters=_w4a8_clusters),
    "w4a8_gemm": Kernel(_w4a8_by("many"), _w4a8_many_refusal, _tile_config("w4a8_gemm")),
    "mixed_gemm_w4a8_parts": Kernel(_w4a8_by("in_parts"), _needs_16_bits),
}
