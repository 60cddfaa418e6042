"""Operands of products with few rows, and the product in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from slipstream_kernels.fp8 import BLOCK
from slipstream_kernels.gemm.reference.scaled_mm import dequantize_rows, dequantize_weight
from tolerances import SCALED_MM


@dataclass(frozen=True)
class Case:
    """weights: "plain" (of dtype), "channel" or "block" (e4m3 and its scales) or "int8"."""

    num_tokens: int
    out_features: int
    in_features: int
    weights: str
    gated: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Drawn:
    what: Case
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def swap_ab_shapes(weights: str) -> list[tuple[int, int]]:
    """(out, in) features of products with weights as the A operand, for weights as in Case.

    Several passes or tiles of a CTA; odd numbers of units (16 rows) and of chunks (128 bytes of a row); sums that end
    inside a chunk, which blocks do not allow; fewer rows than CTAs; two units.
    """
    shapes = [(6144, 4096), (1072, 1152), (2064, 1040), (160, 256), (32, 128)]
    return [(out, summed) for out, summed in shapes if weights != "block" or summed % BLOCK == 0]


def draw_case(what: Case, device: torch.device) -> Drawn:
    """Random operands; the weight's rows differ in scale."""
    x = torch.randn(what.num_tokens, what.in_features, device=device).to(what.dtype)
    weight = torch.randn(what.out_features, what.in_features, device=device) / what.in_features**0.5
    weight *= torch.logspace(-1, 0.5, what.out_features, device=device)[:, None]
    bias = torch.randn(what.out_features, device=device).to(what.dtype)
    if what.weights == "plain":
        return Drawn(what, (x, weight.to(what.dtype), None, bias))
    if what.weights == "channel":
        rows = ops.quantize_fp8(weight)
        return Drawn(what, (x, rows.values, rows.scales.view(-1), bias))
    if what.weights == "int8":
        quantised = ops.quantize_int8_weight(weight)
        return Drawn(what, (x, quantised.values, quantised.scales, bias))
    values, blocks = ops.quantize_fp8_blocks(weight)
    scales = ops.block_scales(what.out_features, what.in_features, device)
    scales[:, : blocks.shape[1]] = blocks
    return Drawn(what, (x, values, scales, bias))


def exact(case: Drawn) -> torch.Tensor:
    """The product in fp64 from the same operands."""
    y, _ = _sums(case)
    if case.what.gated:
        gate, up = y.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return y


def quantised(case: Drawn) -> tuple[ops.Fp8Rows, Drawn]:
    """(e4m3 activations with scales that match the weight's, the case with the dequantised activations)"""
    x, *rest = case.operands
    rows = ops.quantize_fp8(x, ops.Fp8Scheme(128 if case.what.weights == "block" else 0))
    return rows, Drawn(case.what, (dequantize_rows(rows), *rest))


def tolerance(case: Drawn, expected: torch.Tensor, sums: str = "cpu") -> torch.Tensor:
    """Bound of the rounding errors of the result's dtype and of fp32 sums, relative to the size of their terms.

    sums: "cuda" for sums of FP8 tensor cores.
    """
    rtol, atol = SCALED_MM[sums, torch.float32 if case.what.dtype == torch.float32 else torch.bfloat16]
    y, size = _sums(case)
    limit = atol * size
    if case.what.gated:
        gate, up = y.chunk(2, dim=-1)
        gate_limit, up_limit = limit.chunk(2, dim=-1)
        limit = 1.1 * gate_limit * up.abs() + (gate.abs() + gate_limit) * up_limit
    return rtol * expected.abs() + limit


def poison_result(what: Case) -> None:
    """Fill the memory of the next result with NaN, which exposes elements that are never written."""
    features = what.out_features // (2 if what.gated else 1)
    torch.full((what.num_tokens, features), float("nan"), dtype=what.dtype, device="cuda")


def assert_chain_in_a_graph_is_right(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], num_tokens: int, features: int
) -> None:
    """Capture 40 products with PDL, where each starts before the previous one ends, and replay them on new input."""
    weights = [torch.randn(features, features, device="cuda", dtype=torch.bfloat16) / features**0.5 for _ in range(40)]
    x = torch.randn(num_tokens, features, device="cuda", dtype=torch.bfloat16)

    def chain(y: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            y = product(y, weight)
        return y

    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(10):
        x.normal_()
        graph.replay()
        expected = x
        for weight in weights:
            expected = product(expected, weight)
            torch.cuda.synchronize()
        assert torch.equal(y, expected)


def _sums(case: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, scales, bias = case.operands
    wide = weight.double() if scales is None else dequantize_weight(weight, scales).double()
    size = (x.double().square() @ wide.square().t()).sqrt()
    return x.double() @ wide.t() + bias.double(), size
