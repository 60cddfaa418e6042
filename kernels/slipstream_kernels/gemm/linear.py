"""linear, gated_linear: every dense product of a model.  gemm/choose.py says which kernel makes it."""

from __future__ import annotations

from torch import Tensor

from slipstream_kernels.cuda.build import KernelBuildError
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.activation_quant import A, Activation, ActivationQuant
from slipstream_kernels.gemm.choose import this_device, variant_of
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.gemm.library.fp32_mm import fp32_mm
from slipstream_kernels.gemm.linear_weight import LinearWeight
from slipstream_kernels.gemm.product import FP8_ROWS, INT8_ROWS, PLAIN_ROWS, Product


def linear(x: Activation, weight: LinearWeight) -> Tensor:
    """x @ dequantised(weight).T + bias as [num_tokens, out_features], in the dtype of x, accumulated in fp32.

    x: [num_tokens, in_features] in the form of weight.input_quant.
    """
    return _multiply(x, weight, gated=False)[0]


def linear_before_bias(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor | None]:
    """linear's result and None; or the product in fp32 without its bias, and the bias, for a kernel that reads it.

    The library splits long sums of few output features, as those of a router, and adds a bias to them in a launch of
    its own.  Nothing is rounded in between.
    """
    if weight.bias is None or not _is_by_library(x, weight):
        return linear(x, weight), None
    return fp32_mm(x, weight.tensor), weight.bias


def _is_by_library(x: Tensor, weight: LinearWeight) -> bool:
    if x.device.type != "cuda" or weight.order is not None or weight.kind.format != "plain":
        return False
    return variant_of(Product(weight.kind, x.shape[0], PLAIN_ROWS, x.dtype, False)).kernel in (
        "library",
        "library_split",
    )


def gated_linear(x: Activation, weight: LinearWeight, quant: ActivationQuant[A], activation: str = "silu") -> A:
    """activation(first half of the columns) * second half of that product, quantised as `quant` says.

    The gate is part of the product's launch where its kernel can, which is silu's alone; else of the launch that
    quantises.  activation: silu or gelu_tanh.
    """
    y, is_gated = _multiply(x, weight, gated=activation == "silu")
    return quant.cast(y) if is_gated else quant.gated_mul(y, activation)


def _multiply(x: Activation, weight: LinearWeight, *, gated: bool) -> tuple[Tensor, bool]:
    """(the product, whether it is gated already)"""
    if weight.order is not None:
        assert isinstance(x, Tensor)
        x = weight.quant.cast(x[:, weight.order[0]])
    if isinstance(x, Tensor):
        rows, form, num_rows = x, PLAIN_ROWS, x.shape[0]
    else:
        rows, form, num_rows = x.values, FP8_ROWS if isinstance(x, Fp8Rows) else INT8_ROWS, x.num_tokens
    kind = weight.kind
    if rows.shape[-1] != kind.in_features or rows.dim() != 2:
        raise ValueError(f"x: shape {tuple(rows.shape)}, expected [num_tokens, {kind.in_features}]")
    product = Product(kind, num_rows, form, x.dtype, gated)
    while True:
        variant = variant_of(product)
        try:
            return KERNELS[variant.kernel].run(x, weight, variant.config, variant.is_gated), variant.is_gated
        except KernelBuildError as error:
            this_device(kind.device).give_up(variant.kernel, product, error)
            variant_of.cache_clear()
