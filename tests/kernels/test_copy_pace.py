"""The pace of early copies: what it is on a GPU, and that results do not depend on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hopper import needs_hopper
from int4_weights import weight_of
from slipstream_kernels import dependent_launch, ops
from slipstream_kernels.fp8 import Fp8Scheme
from slipstream_kernels.gemm import int4_layout, w4a8_layout
from slipstream_kernels.gemm.cuda import (
    mixed_gemm,
    mixed_gemm_pairs,
    mixed_gemm_w4a8,
    mixed_gemm_w4a16,
    stream_plan,
    swap_ab_stream,
)

SIZE = 4096
KERNELS = (
    "skinny_gemm",
    "swap_ab_gemm",
    "swap_ab_stream",
    "mixed_gemm",
    "mixed_gemm_w4a16",
    "mixed_gemm_pairs",
    "mixed_gemm_w4a8",
)
LAUNCHED_BY = {"mixed_gemm_pairs": "mixed_gemm_w4a16"}  # modules
Product = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ({"memory_clock_rate": 3_201_000, "memory_bus_width": 6016, "clock_rate": 1_980_000}, 16),  # H200
        ({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120, "clock_rate": 1_980_000}, 11),  # H100
        ({"memory_clock_rate": 0, "memory_bus_width": 5120, "clock_rate": 1_980_000}, 0),  # not stated
        ({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120, "clock_rate": 0}, 0),
    ],
)
def test_pace_is_a_little_less_than_an_sm_gets(
    gpu: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(**gpu, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    dependent_launch.copy_pace.cache_clear()
    try:
        assert dependent_launch.copy_pace(torch.device("cuda", 0)) == expected
    finally:
        dependent_launch.copy_pace.cache_clear()


def module_that_launches(kernel: str) -> ModuleType:
    return importlib.import_module(f"slipstream_kernels.gemm.cuda.{LAUNCHED_BY.get(kernel, kernel)}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_module_that_launches_asks_for_the_pace(kernel: str) -> None:
    assert callable(module_that_launches(kernel).copy_pace)


@needs_hopper
@pytest.mark.parametrize("kernel", KERNELS)
def test_results_do_not_depend_on_the_pace(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph, where each product comes up while the one before still runs. 1: slower than any of them takes."""
    module = module_that_launches(kernel)
    torch.manual_seed(0)
    product, results = product_by(kernel), []
    asked: list[int] = []

    def told(pace: int) -> Callable[[torch.device], int]:
        def answer(_: torch.device) -> int:
            asked.append(pace)
            return pace

        return answer

    x = torch.randn(70, SIZE, device="cuda").bfloat16()
    for pace in (0, 1, 16):
        monkeypatch.setattr(module, "copy_pace", told(pace))
        results.append(of_a_chain(product, x))
    assert set(asked) == {0, 1, 16}
    assert results[0].isfinite().all() and results[0].float().std() > 0
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def of_a_chain(product: Product, x: torch.Tensor) -> torch.Tensor:
    def chain() -> torch.Tensor:
        y = x
        for _ in range(6):
            y = product(y)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        graph.replay()
    return y.clone()


def product_by(kernel: str) -> Product:
    """A product of square weights that this kernel makes, of as many rows as it is for."""
    plain = torch.randn(SIZE, SIZE, device="cuda").bfloat16() / SIZE**0.5
    four_bits, no_bias = weight_of(SIZE, SIZE, 128, True), None
    if kernel == "skinny_gemm":
        return lambda x: ops.skinny_gemm(x[:8], plain, backend="cuda")
    if kernel == "swap_ab_gemm":
        return lambda x: ops.swap_ab_gemm(x[:33], plain, backend="cuda")
    if kernel == "swap_ab_stream":
        fp8, plan = ops.quantize_fp8(plain), stream_plan.Plan(128, 32, 132)
        return lambda x: swap_ab_stream.swap_ab_stream(ops.quantize_fp8(x), fp8.values, fp8.scales, no_bias, plan)
    if kernel == "mixed_gemm":
        int8 = ops.quantize_int8_weight(plain)
        words = ops.repack_int8(int8.values)
        return lambda x: ops.int8_mm(x[:33], words, int8.scales, backend="cuda")
    if kernel == "mixed_gemm_w4a8":
        repacked = w4a8_layout.repack(four_bits)
        scheme = Fp8Scheme(sum_columns=w4a8_layout.sum_columns(four_bits.group_size))
        return lambda x: by_w4a8(ops.quantize_fp8(x[:33], scheme), repacked)
    repacked, kind = int4_layout.repack(four_bits), mixed_gemm_w4a16.format_of(torch.bfloat16, 1)
    if kernel == "mixed_gemm_pairs":
        return lambda x: by_pairs(x[:8], repacked)
    at_once = partial(mixed_gemm_w4a16.clusters_at_once, plain.device, kind)
    variant = next(iter(mixed_gemm_w4a16.candidates(33, (SIZE, SIZE), at_once)))
    return lambda x: by_w4a16(x[:33], repacked, variant)


def by_w4a8(rows: ops.Fp8Rows, weight: ops.Int4Weight) -> torch.Tensor:
    out = torch.empty(rows.num_tokens, SIZE, dtype=torch.bfloat16, device="cuda")
    assert rows.activation_sums is not None
    mixed_gemm_w4a8.mixed_gemm_w4a8(rows, weight, None, out, activation_sums=rows.activation_sums)
    return out


def by_pairs(x: torch.Tensor, weight: ops.Int4Weight) -> torch.Tensor:
    out = torch.empty_like(x)
    mixed_gemm_pairs.mixed_gemm_pairs(x, weight, None, out, mixed_gemm.Variant(16, 1, 2))
    return out


def by_w4a16(x: torch.Tensor, weight: ops.Int4Weight, variant: mixed_gemm.Variant) -> torch.Tensor:
    out = torch.empty_like(x)
    mixed_gemm_w4a16.mixed_gemm_w4a16(x, weight, None, out, variant)
    return out
