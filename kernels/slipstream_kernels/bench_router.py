"""Time routers with a bias on a GPU, the product and the choice of experts, by who adds the bias.

    python -m slipstream_kernels.bench_router [--tokens 1,16,17,...]

in linear: the product.  fp32, bf16: route_experts, to a product of that type without the bias.  as served: what a
layer does (ops.linear_before_bias).  Each time is of a CUDA graph of as many layers as the model has, divided by their
number; "product" is that of the product alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slipstream_kernels import ops
from slipstream_kernels.bench_fp8 import graph_microseconds
from slipstream_kernels.gemm.library.fp32_mm import fp32_mm
from slipstream_kernels.ops import LinearWeight, Routing

# layers, experts, of a token, features
ROUTERS = {"gpt-oss-20b": (24, 32, 4, 2880), "gpt-oss-120b": (36, 128, 4, 2880)}
Product = Callable[[Tensor, LinearWeight], tuple[Tensor, Tensor | None]]


def _in_linear(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor | None]:
    return ops.linear(x, weight), None


def _fp32(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor | None]:
    return fp32_mm(x, weight.tensor), weight.bias


def _bf16(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor | None]:
    return x @ weight.tensor.t(), weight.bias


PRODUCTS: dict[str, Product] = {
    "in linear": _in_linear, "fp32": _fp32, "bf16": _bf16, "as served": ops.linear_before_bias,
}  # fmt: skip


def route(product: Product, x: Tensor, weight: LinearWeight, top_k: int) -> Routing:
    """The experts of x's tokens."""
    logits, bias = product(x, weight)
    return ops.route_experts(logits, top_k, logit_bias=bias)


def main() -> None:
    """Print the times; see the module's text."""
    parser = argparse.ArgumentParser(description="Time routers with a bias")
    parser.add_argument("--tokens", default="1,8,16,17,32,64,128,256,512,2048,8192")
    counts = [int(count) for count in parser.parse_args().tokens.split(",")]
    for model, (num_layers, num_experts, top_k, size) in ROUTERS.items():
        bias = torch.randn(num_experts, device="cuda").bfloat16()
        tensors = (torch.randn(num_layers, num_experts, size, device="cuda") / 50).bfloat16()
        weights = [ops.plain_weight(tensor, bias) for tensor in tensors]
        for count in counts:
            x = torch.randn(count, size, device="cuda").bfloat16()
            times = []
            for name, product in PRODUCTS.items():
                both = graph_microseconds([partial(route, product, x, weight, top_k) for weight in weights], repeats=5)
                alone = graph_microseconds([partial(product, x, weight) for weight in weights], repeats=5)
                times.append(f"{name} {both:.2f} us (product {alone:.2f})")
            print(f"{model} {count} tokens: {', '.join(times)}", flush=True)


if __name__ == "__main__":
    main()
