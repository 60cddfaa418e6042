"""grouped_linear: every product of experts.  moe/choose.py says which kernel makes it."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream_kernels.cuda.build import KernelBuildError
from slipstream_kernels.gemm.activation_quant import Activation, ActivationQuant
from slipstream_kernels.gemm.linear_weight import LinearWeight
from slipstream_kernels.moe.choose import this_device, variant_of
from slipstream_kernels.moe.kernels import KERNELS, Call
from slipstream_kernels.moe.product import Product
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.routing import Routing

MOST_ORDERED = 1 << 22  # features that are put in order at a time: their places take 32 MiB


def grouped_linear(
    x: Activation, weight: LinearWeight, routing: Routing, *, by_token: bool = False, gated: bool = False
) -> Tensor:
    """y[r] = x[r] @ dequantised(weight of row r's expert).T as [num_rows, out_features of an expert], in x's dtype.

    x: [num_rows, in_features], a row for each row of the routing; by_token: for each token.  Plain rows are quantised
    as the weight says, where the choice says so.
    gated: returns silu(first half of the columns) * second half.
    """
    y, is_gated = _multiply(x, weight, routing, by_token, gated)
    return silu_mul(y) if gated and not is_gated else y


def grouped_gated_linear(
    x: Activation,
    weight: LinearWeight,
    routing: Routing,
    quant: ActivationQuant[Activation],
    *,
    by_token: bool = False,
) -> Activation:
    """silu(first half of the columns) * second half of that product, for layers that read rows as `quant` says.

    Rows are plain where the product's kernel applies the gate: grouped_linear quantises them.
    """
    y, is_gated = _multiply(x, weight, routing, by_token, gated=True)
    return y if is_gated else quant.gated_mul(y, "silu")


def _multiply(
    x: Activation, weight: LinearWeight, routing: Routing, by_token: bool, gated: bool
) -> tuple[Tensor, bool]:
    """(the product, whether it is gated already)"""
    kind = weight.kind
    if weight.order is not None:
        assert isinstance(x, Tensor)
        x, by_token = _in_orders(x, weight.order, routing, by_token), False
    wanted = (routing.num_tokens if by_token else routing.num_rows, kind.in_features)
    found = tuple(x.shape) if isinstance(x, Tensor) else (x.num_tokens, x.values.shape[1])
    if found != wanted or kind.num_experts != routing.num_experts:
        experts = f"{routing.num_experts} experts, expected {wanted} of {kind.num_experts}"
        raise ValueError(f"x: shape {found} of {experts}")
    num_tokens, num_rows, _ = routing.sizes
    product = Product(kind, num_tokens, num_rows, x.dtype, gated)
    while True:
        variant = variant_of(product)
        rows = weight.quant.cast(x) if variant.quantises and isinstance(x, Tensor) else x
        call = Call(rows, weight, routing, by_token, variant.is_gated)
        try:
            return KERNELS[variant.kernel].run(call, variant.config), variant.is_gated
        except KernelBuildError as error:
            this_device(kind.device).give_up(variant.kernel, product, error)
            variant_of.cache_clear()


def _in_orders(x: Tensor, orders: Tensor, routing: Routing, by_token: bool) -> Tensor:
    """A row for each row of the routing, its features in the order of its expert's weights."""
    numbers = torch.arange(routing.num_rows, device=x.device, dtype=torch.int32)
    experts = torch.bucketize(numbers, routing.offsets[1:], right=True)
    rows = x[routing.tokens] if by_token else x
    ordered, step = rows.new_empty(len(rows), orders.shape[1]), MOST_ORDERED // orders.shape[1] + 1
    for begin in range(0, routing.num_rows, step):
        part = slice(begin, begin + step)
        torch.gather(rows[part], 1, orders[experts[part]], out=ordered[part])
    return ordered
