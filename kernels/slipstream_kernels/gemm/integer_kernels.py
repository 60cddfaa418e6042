"""The kernels of dense products with weights of 4 or 8 bits in integers, as kernels.py has those of other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda import stream_w4a8_choice, stream_w4a16_choice
from slipstream_kernels.gemm.int4_checks import write_out_refusal
from slipstream_kernels.gemm.kernel_rules import (
    Rows,
    Run,
    aligned,
    bias_of,
    in_cuda,
    in_pairs_of_tiles,
    needs_16_bits,
    needs_gpu,
)
from slipstream_kernels.gemm.product import Product
from slipstream_kernels.gemm.tuning import tuning_of
from slipstream_kernels.kernel_choice import Config, Device, Kernel, always, never
from slipstream_kernels.select import load_module

if TYPE_CHECKING:
    from slipstream_kernels.gemm.linear_weight import LinearWeight


# int8 weights


def _int8_gemm_refusal(product: Product) -> str | None:
    weight = product.weight
    reason: str | None = in_cuda("int8_gemm").product_refusal(
        weight.device, product.dtype, (weight.out_features, weight.in_features)
    )
    return reason


def _tile_config(name: str) -> Callable[[Product, Device[Product]], Config]:
    def configure(product: Product, device: Device[Product]) -> Config:
        tiles, narrow_cost = in_cuda(name).TILES, tuning_of(device.name).narrow_tile_costs[name]
        sizes = product.num_rows, product.weight.out_features
        tile: Config = in_cuda("cutlass_gemm").choose_tile(tiles, *sizes, device.num_sms, narrow_cost)
        return tile

    return configure


def _int8_gemm(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    kernel = in_cuda("int8_gemm")
    y: Tensor = kernel.int8_gemm(x, weight.tensor, weight.scales, weight.bias, kernel.Tile(*config))
    return y


def _mixed(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    kernel = in_cuda("mixed_gemm")
    y: Tensor = kernel.mixed_gemm(
        aligned(x), weight.tensor, weight.scales, bias_of(weight, x.dtype), gated, kernel.Variant(*config)
    )
    return y


def _int8_written_out(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    expand = load_module("triton", "gemm.int8_dequantise").int8_dequantise
    return F.linear(x, expand(weight.tensor, weight.scales, x.dtype), bias_of(weight, x.dtype))


# 4-bit weights


def _int4_by(name: str) -> Run:
    def run(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
        assert isinstance(x, Tensor)
        rows = aligned(x)
        y: Tensor = getattr(in_cuda("int4_mm"), name)(rows, weight.int4, bias_of(weight, x.dtype), gated, config)
        return y

    return run


def _needs_bf16(product: Product) -> str | None:
    return None if product.dtype == torch.bfloat16 else f"rows are {product.dtype}, not bfloat16"


def _stream_w4a16_refusal(product: Product) -> str | None:
    groups = int4_layout.groups_per_block(product.weight.group_size)
    return needs_16_bits(product) or in_cuda("stream_w4a16").build_refusal(product.dtype, groups)


def _stream_w4a16_config(product: Product, device: Device[Product]) -> Config | None:
    sizes, tuning = (product.weight.out_features, product.weight.in_features), tuning_of(device.name)
    return stream_w4a16_choice.choose(
        product.num_rows,
        sizes,
        lambda columns: device.count_clusters("stream_w4a16", product, (columns,)),
        tuning.stream_w4a16,
    )


def _stream_w4a16_ctas(product: Product, config: Config) -> int:
    weight, kernel = product.weight, in_cuda("stream_w4a16")
    kind = product.dtype, int4_layout.groups_per_block(weight.group_size)
    kernel.build_all(*kind)
    count: int = kernel.count_ctas(weight.device, *kind, *config)
    return count


def _stream_w4a16(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor) and not gated
    kernel = in_cuda("stream_w4a16")
    y: Tensor = kernel.stream_w4a16(
        aligned(x), weight.int4, bias_of(weight, x.dtype), kernel.Plan(*config), weight.counters
    )
    return y


def _int4_write_out_refusal(product: Product) -> str | None:
    return needs_gpu(product) or needs_16_bits(product) or write_out_refusal(product.weight.group_size)


def _int4_canonical_written_out(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    assert isinstance(x, Tensor)
    expand = load_module("triton", "gemm.int4_dequantise").int4_dequantise
    return F.linear(x, expand(weight.int4, x.dtype), bias_of(weight, x.dtype))


def _w4a8_by(name: str) -> Run:
    def run(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
        y: Tensor = getattr(in_cuda("w4a8_mm"), name)(x, weight.int4, bias_of(weight, x.dtype), config)
        return y

    return run


def _stream_w4a8_refusal(product: Product) -> str | None:
    groups = int4_layout.groups_per_block(product.weight.group_size)
    return needs_16_bits(product) or in_cuda("stream_w4a8").build_refusal(product.dtype, groups)


def _stream_w4a8_config(product: Product, device: Device[Product]) -> Config | None:
    sizes, tuning = (product.weight.out_features, product.weight.in_features), tuning_of(device.name)
    return stream_w4a8_choice.choose(
        product.num_rows, sizes, lambda tile: device.count_clusters("stream_w4a8", product, tile), tuning
    )


def _stream_w4a8_ctas(product: Product, config: Config) -> int:
    weight, kernel = product.weight, in_cuda("stream_w4a8")
    kind = product.dtype, int4_layout.groups_per_block(weight.group_size)
    kernel.build_all(*kind)
    count: int = kernel.count_ctas(weight.device, *kind, stream_w4a8_choice.Tile(*config))
    return count


def _stream_w4a8(x: Rows, weight: LinearWeight, config: Config, gated: bool) -> Tensor:
    y: Tensor = in_cuda("w4a8_mm").shared_out(x, weight.int4, bias_of(weight, x.dtype), config, weight.counters)
    return y


def _w4a8_many_refusal(product: Product) -> str | None:
    reason: str | None = in_cuda("w4a8_mm").many_rows_refusal(product.dtype)
    return reason


def _mixed_gemm(
    name: str,
    run: Run,
    gates: Callable[[Product], bool] = never,
    refusal: Callable[[Product], str | None] = needs_16_bits,
) -> Kernel[Product, Run]:
    """A format of the mixed GEMM; gemm/cuda/<name>.py has its libraries and the choice of its variant."""

    def configure(product: Product, device: Device[Product]) -> Config | None:
        weight = product.weight
        chosen: Config | None = in_cuda(name).choose(
            product.num_rows,
            (weight.out_features, weight.in_features),
            lambda found: device.count_clusters(name, product, found),
            tuning_of(device.name),
        )
        return chosen

    def count_clusters(product: Product, config: Config) -> int:
        kernel, weight = in_cuda(name), product.weight
        weight_format = kernel.format_of(product.dtype, int4_layout.groups_per_block(weight.group_size))
        count: int = in_cuda("mixed_gemm").clusters_at_once(weight.device, weight_format, kernel.Variant(*config))
        return count

    return Kernel(run, refusal, configure, gates, count_clusters)


INTEGER_KERNELS: Mapping[str, Kernel[Product, Run]] = {
    "int8_gemm": Kernel(_int8_gemm, _int8_gemm_refusal, _tile_config("int8_gemm")),
    "mixed_gemm": _mixed_gemm("mixed_gemm", _mixed, in_pairs_of_tiles),
    "int8_dequantise+library": Kernel(_int8_written_out),
    "skinny_gemm_w4a16": Kernel(_int4_by("rows"), needs_16_bits, gates=in_pairs_of_tiles),
    "mixed_gemm_pairs": _mixed_gemm("mixed_gemm_pairs", _int4_by("pairs"), always, _needs_bf16),
    "mixed_gemm_w4a16": _mixed_gemm("mixed_gemm_w4a16", _int4_by("mixed")),
    "stream_w4a16": Kernel(_stream_w4a16, _stream_w4a16_refusal, _stream_w4a16_config, never, _stream_w4a16_ctas),
    "int4_dequantise+library": Kernel(_int4_by("written_out"), needs_16_bits),
    "int4_canonical_dequantise+library": Kernel(_int4_canonical_written_out, _int4_write_out_refusal),
    "mixed_gemm_w4a8": _mixed_gemm("mixed_gemm_w4a8", _w4a8_by("few")),
    "stream_w4a8": Kernel(_stream_w4a8, _stream_w4a8_refusal, _stream_w4a8_config, never, _stream_w4a8_ctas),
    "w4a8_gemm": Kernel(_w4a8_by("many"), _w4a8_many_refusal, _tile_config("w4a8_gemm")),
    "mixed_gemm_w4a8_parts": Kernel(_w4a8_by("in_parts"), needs_16_bits),
}
