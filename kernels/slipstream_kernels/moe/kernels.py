"""The kernels of experts' products: what each refuses, which of its variants it takes, and how it is called.

Choices are made in moe/choose.py and tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from slipstream_kernels.cuda.device import is_hopper
from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm.int4_checks import group_refusal, write_out_refusal
from slipstream_kernels.gemm.limits import written_out_bytes
from slipstream_kernels.gemm.linear_weight import LinearWeight
from slipstream_kernels.gemm.product import PLAIN_ROWS
from slipstream_kernels.gemm.tuning import MOST_WRITTEN_OUT_BYTES
from slipstream_kernels.integer import Int4Weight, Int8Rows
from slipstream_kernels.kernel_choice import Config, Device, Kernel, always, no_refusal
from slipstream_kernels.moe.product import Product
from slipstream_kernels.moe.tuning import tuning_of
from slipstream_kernels.routing import Routing
from slipstream_kernels.select import load_module, select

Rows = Tensor | Fp8Rows | Int8Rows
LIBRARY_ALIGNMENT = 16  # features of a weight that the library takes are multiples of it


@dataclass(frozen=True)
class Call:
    """by_token: a row of x for each token, else for each row of the routing.  gated: silu(gate) * up is wanted.

    Kernels that do not gate are never asked for it.
    """

    x: Rows
    weight: LinearWeight
    routing: Routing
    by_token: bool
    gated: bool


Run = Callable[[Call, Config], Tensor]


def _module(backend: str, name: str) -> ModuleType:
    return load_module(backend, f"moe.{name}")


def _needs_gpu(product: Product) -> str | None:
    device = product.weight.device
    return None if device.type == "cuda" else f"the weight is on {device}"


def _library_refusal(product: Product) -> str | None:
    weight = product.weight
    if weight.device.type != "cuda" or not is_hopper(weight.device):
        return "the device is not a Hopper GPU"
    if product.dtype != torch.bfloat16 or (weight.format == "plain" and weight.dtype != product.dtype):
        return f"rows are {product.dtype}, not bfloat16"
    if weight.out_features % LIBRARY_ALIGNMENT or weight.in_features % LIBRARY_ALIGNMENT:
        return f"the weight's features are not multiples of {LIBRARY_ALIGNMENT}"
    return None


def _int4_triton_refusal(product: Product) -> str | None:
    return _needs_gpu(product) or group_refusal(product.weight.group_size, product.weight.in_features)


def _needs_bf16(product: Product) -> str | None:
    return None if product.dtype == torch.bfloat16 else f"rows are {product.dtype}, not bfloat16"


def _needs_16bit(product: Product) -> str | None:
    is_narrow = product.dtype in (torch.bfloat16, torch.float16)
    return None if is_narrow else f"rows are {product.dtype}, not bfloat16 or float16"


def _needs_bf16_on_gpu(product: Product) -> str | None:
    return _needs_gpu(product) or _needs_bf16(product)


def _experts_write_out_refusal(product: Product) -> str | None:
    """Why weights are not written out in 16 bits, the type of the rows; None if they are."""
    weight = product.weight
    if (reason := _needs_16bit(product)) is not None:
        return reason
    num_weights = weight.num_experts * weight.out_features * weight.in_features
    if not written_out_bytes("int4", PLAIN_ROWS, weight.num_experts, num_weights, product.dtype):
        return f"written out, the experts' {num_weights} weights take more than {MOST_WRITTEN_OUT_BYTES} bytes"
    return None


def _canonical_write_out_refusal(product: Product) -> str | None:
    weight = product.weight
    reason = _int4_triton_refusal(product) or write_out_refusal(weight.group_size)
    return reason or _experts_write_out_refusal(product)


def _grouped_by(backend: str) -> Run:
    """Products of 16-bit, e4m3, int8 and canonical 4-bit weights by the version of that backend."""

    def run(call: Call, config: Config) -> Tensor:
        y: Tensor
        if isinstance(call.weight.operand, Int4Weight):
            module = _module(backend, "grouped_int4_mm")
            y = module.grouped_int4_mm(call.x, call.weight.operand, call.routing, call.by_token, call.gated)
        else:
            module, weight = _module(backend, "grouped_mm"), call.weight
            y = module.grouped_mm(call.x, weight.operand, call.routing, weight.scales, call.by_token, call.gated)
        return y

    return run


def _invariant(call: Call, config: Config) -> Tensor:
    assert isinstance(call.x, Tensor)
    module, weight = select("moe.invariant_grouped_mm", "auto", call.x), call.weight
    y: Tensor = module.invariant_grouped_mm(call.x, weight.tensor, call.routing, weight.scales, call.by_token)
    return y


def _written_out_by(expand: Callable[[Int4Weight, int], tuple[Tensor, Tensor]]) -> Run:
    """Weights are written as e4m3 first: bound by arithmetic, products of two e4m3 operands are twice as fast."""

    def run(call: Call, config: Config) -> Tensor:
        from slipstream_kernels.moe.grouped_mm import grouped_mm

        num_experts = call.routing.num_experts
        values, scales = (part.unflatten(0, (num_experts, -1)) for part in expand(call.weight.int4, num_experts))
        return grouped_mm(call.x, values, call.routing, scales, by_token=call.by_token, gated=call.gated)

    return run


def _dequantise_w4a8(weight: Int4Weight, num_experts: int) -> tuple[Tensor, Tensor]:
    """(e4m3 [out_features of all experts, in_features], scales of its rows)"""
    return _module("triton", "dequantise_w4a8").dequantise_w4a8(weight, num_experts), weight.scales


def _dequantise_w4a16(weight: Int4Weight, num_experts: int) -> tuple[Tensor, Tensor]:
    assert weight.zeros is not None
    return _module("triton", "dequantise_w4a16").dequantise_w4a16(weight, E4M3), weight.zeros


def _written_out_16bit_by(expand: Callable[[Int4Weight, torch.dtype], Tensor]) -> Run:
    """Weights are written in the type of the rows first, and read by what multiplies those."""

    def run(call: Call, config: Config) -> Tensor:
        from slipstream_kernels.moe.grouped_mm import grouped_mm

        experts = expand(call.weight.int4, call.x.dtype).unflatten(0, (call.routing.num_experts, -1))
        return grouped_mm(call.x, experts, call.routing, by_token=call.by_token, gated=call.gated)

    return run


def _dequantise_mxfp4_16bit(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    values: Tensor = _module("triton", "dequantise_mxfp4").dequantise_mxfp4(weight)
    return values


def _dequantise_grouped_mxfp4_16bit(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    values: Tensor = _module("cuda", "grouped_mxfp4_gemm").written_out(weight)
    return values


def _dequantise_w4a16_16bit(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    values: Tensor = _module("triton", "dequantise_w4a16").dequantise_w4a16(weight, dtype)
    return values


def _dequantise_int4_16bit(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    values: Tensor = load_module("triton", "gemm.int4_dequantise").int4_dequantise(weight, dtype)
    return values


def _grouped_gemm(name: str, refusal: Callable[[Product], str | None] = no_refusal) -> Kernel[Product, Run]:
    """A format of the grouped GEMM; moe/cuda/<name>.py has its libraries and the choice of a variant."""

    def run(call: Call, config: Config) -> Tensor:
        y: Tensor = _module("cuda", name).grouped_int4_mm(
            call.x, call.weight.int4, call.routing, call.by_token, call.gated, config
        )
        return y

    def configure(product: Product, device: Device[Product]) -> Config:
        sizes = product.num_tokens, product.num_rows, product.weight.num_experts
        chosen: Config = _module("cuda", name).choose(
            sizes, product.weight.out_features, device.num_sms, tuning_of(device.name)
        )
        return chosen

    return Kernel(run, refusal, configure, always)


def _stream_refusal(product: Product) -> str | None:
    reason: str | None = _module("cuda", "grouped_stream").product_refusal(product)
    return reason


def _stream_config(product: Product, device: Device[Product]) -> Config:
    chosen: Config = _module("cuda", "grouped_stream").choose(product, tuning_of(device.name))
    return chosen


def _stream(call: Call, config: Config) -> Tensor:
    kernel = _module("cuda", "grouped_stream")
    y: Tensor = kernel.grouped_mm(call.x, call.weight, call.routing, call.by_token, call.gated, kernel.Variant(*config))
    return y


KERNELS: Mapping[str, Kernel[Product, Run]] = {
    "library": Kernel(_grouped_by("library"), _library_refusal),
    "grouped_mm": Kernel(_grouped_by("triton"), _needs_gpu, gates=always),
    "grouped_stream": Kernel(_stream, _stream_refusal, _stream_config, gates=always),
    "grouped_int4_mm": Kernel(_grouped_by("triton"), _int4_triton_refusal, gates=always),
    "reference": Kernel(_grouped_by("reference"), gates=always),
    "invariant_grouped_mm": Kernel(_invariant),
    "grouped_w4a16_gemm": _grouped_gemm("grouped_w4a16_gemm"),
    "grouped_w4a16_wide": _grouped_gemm("grouped_w4a16_wide", _needs_16bit),
    "grouped_w4a8_gemm": _grouped_gemm("grouped_w4a8_gemm"),
    "grouped_mxfp4_gemm": _grouped_gemm("grouped_mxfp4_gemm", _needs_bf16),
    "grouped_mxfp4_wide": _grouped_gemm("grouped_mxfp4_wide", _needs_bf16),
    "dequantise_grouped_mxfp4+grouped_mm": Kernel(
        _written_out_16bit_by(_dequantise_grouped_mxfp4_16bit), _needs_bf16, gates=always
    ),
    "dequantise_mxfp4+grouped_mm": Kernel(
        _written_out_16bit_by(_dequantise_mxfp4_16bit), _needs_bf16_on_gpu, gates=always
    ),
    "dequantise_int4_16bit+grouped_mm": Kernel(
        _written_out_16bit_by(_dequantise_int4_16bit), _canonical_write_out_refusal, gates=always
    ),
    "dequantise_w4a16_16bit+grouped_mm": Kernel(
        _written_out_16bit_by(_dequantise_w4a16_16bit), _experts_write_out_refusal, gates=always
    ),
    "dequantise_w4a16+grouped_mm": Kernel(_written_out_by(_dequantise_w4a16), _needs_bf16, gates=always),
    "dequantise_w4a8+grouped_mm": Kernel(_written_out_by(_dequantise_w4a8), _needs_bf16, gates=always),
}
