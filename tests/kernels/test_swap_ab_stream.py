"""FP8 products in evenly shared chunks: right against fp64 however tiles are split, the same every run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hopper import assert_compiles_well, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.gemm.choose import variant_of
from slipstream_kernels.gemm.cuda import swap_ab_stream as cuda_stream
from slipstream_kernels.gemm.cuda.stream_plan import MAX_UNITS, Plan
from slipstream_kernels.gemm.cuda.swap_ab_choice import Product
from slipstream_kernels.gemm.cuda.swap_ab_stream_choice import COLUMNS, plans
from slipstream_kernels.gemm.product import FP8_ROWS
from slipstream_kernels.gemm.product import Product as AnyProduct
from stream_cases import (
    Case,
    Drawn,
    assert_chain_in_a_graph_is_right,
    draw_case,
    exact,
    poison_result,
    quantised,
    swap_ab_shapes,
    tolerance,
)

TOKENS = {128: (5, 65, 127, 128), 256: (130, 200, 256)}


@dataclass(frozen=True)
class Operands:
    """The operands of one product, with zeros for the counters of any plan."""

    rows: ops.Fp8Rows
    case: Drawn
    counters: torch.Tensor

    def multiply(self, plan: Plan) -> torch.Tensor:
        _, weight, scales, bias = self.case.operands
        assert scales is not None
        return cuda_stream.swap_ab_stream(self.rows, weight, scales, bias, plan, self.counters)


def draw(num_tokens: int, out_features: int, in_features: int) -> Operands:
    what = Case(num_tokens, out_features, in_features, "channel", False, torch.bfloat16)
    rows, case = quantised(draw_case(what, torch.device("cuda")))
    return Operands(rows, case, torch.zeros(4096, dtype=torch.int32, device="cuda"))


def some_plans(case: Case, columns: int) -> Iterator[Plan]:
    """Those of the choice, and others: tiles of a few units, CTAs that end inside of tiles, one CTA a tile."""
    product = Product(case.num_tokens, case.out_features, case.in_features, False)
    chosen = list(plans(product, columns, cuda_stream.count_ctas(torch.device("cuda:0"), columns)))
    units, chunks = case.out_features // 16, -(-case.in_features // 128)
    least = -(-units // MAX_UNITS)
    sizes = [(least, 5), (least, least), (least + 1, 132), (2 * least, 7), (min(units, 132), 132), (least, 1)]
    forced = [Plan(columns, tiles, min(ctas, tiles * chunks)) for tiles, ctas in sizes if tiles <= units]
    yield from dict.fromkeys([*chosen, *forced])


@needs_hopper
@pytest.mark.parametrize("columns", COLUMNS)
def test_right_and_the_same_for_every_plan(columns: int) -> None:
    for num_tokens, shape in itertools.product(TOKENS[columns], swap_ab_shapes("channel")):
        operands = draw(num_tokens, *shape)
        expected = exact(operands.case)
        limit = tolerance(operands.case, expected, "cuda")
        for plan in some_plans(operands.case.what, columns):
            poison_result(operands.case.what)
            y = operands.multiply(plan)
            error = (y.double() - expected).abs() - limit
            assert (error <= 0).all(), f"{plan}, {operands.case.what}: {error.max()} at {error.argmax()}"
            assert all(torch.equal(operands.multiply(plan), y) for _ in range(3)), f"{plan}: other bits"
            assert not operands.counters.any(), f"{plan}: counters are left"


@needs_hopper
@pytest.mark.parametrize("columns", COLUMNS)
def test_long_sums_of_one_sign_stay_exact(columns: int) -> None:
    """Sums in the tensor cores alone lose small terms: 14336 of one sign would be off by several percent."""
    x = torch.rand(columns, 14336, device="cuda", dtype=torch.bfloat16)
    weight = ops.quantize_fp8(torch.rand(2048, 14336, device="cuda"))
    rows, scales = ops.quantize_fp8(x), weight.scales.view(-1)
    expected = (rows.values.double() @ weight.values.double().t()) * rows.scales.double() * scales.double()
    for num_tiles, num_ctas in ((16, 128), (16, 16), (16, 77)):
        plan = Plan(columns, num_tiles, num_ctas)
        y = cuda_stream.swap_ab_stream(rows, weight.values, scales, None, plan)
        assert ((y.double() - expected).abs() <= expected / 200).all()


@needs_hopper
@pytest.mark.parametrize(
    "macro", ["LATE_PRODUCER=0", "LATE_PRODUCER=1", "MAX_WAIT_CLOCKS=0", "MAX_WAIT_CLOCKS=100000000"]
)
def test_order_of_events_does_not_matter(macro: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that comes late to every stage; CTAs that never wait for others' sums, or almost for ever."""
    operands = draw(50, 1072, 1152)
    wanted = [(plan, operands.multiply(plan)) for plan in some_plans(operands.case.what, 128)]
    defines = cuda_stream.defines
    monkeypatch.setattr(cuda_stream, "defines", lambda columns: (*defines(columns), f"SLIPSTREAM_{macro}"))
    for plan, expected in wanted:
        assert torch.equal(operands.multiply(plan), expected), plan
        assert not operands.counters.any()


@needs_hopper
def test_a_chain_in_a_graph_sees_what_the_kernel_before_wrote() -> None:
    held: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.data_ptr() not in held:
            rows = ops.quantize_fp8(weight)
            held[weight.data_ptr()] = rows.values, rows.scales.view(-1), ops.scaled_mm_counters(weight)
            torch.cuda.synchronize()  # a product reads weights before the kernel before it has ended
        values, scales, counters = held[weight.data_ptr()]
        plan = Plan(128, 8, 60)
        return cuda_stream.swap_ab_stream(ops.quantize_fp8(x), values, scales, None, plan, counters)

    assert_chain_in_a_graph_is_right(multiply, num_tokens=40, features=1024)


@needs_hopper
def test_streams_do_not_share_sums() -> None:
    products, streams = [draw(64, 4096, 4096) for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    plan = Plan(128, 33, 132)
    expected = [product.multiply(plan) for product in products]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, product, found in zip(streams, products, results):
            with torch.cuda.stream(stream):
                found.append(product.multiply(plan))
    torch.cuda.synchronize()
    assert all(torch.equal(y, wanted) for found, wanted in zip(results, expected) for y in found)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [65, 128, 256])
def test_a_linear_layer_takes_it(num_tokens: int) -> None:
    case = draw(num_tokens, 4096, 14336)
    _, weight, scales, bias = case.case.operands
    assert scales is not None
    linear = ops.fp8_weight(weight, scales, bias, ops.scaled_mm_counters(weight))
    variant = variant_of(AnyProduct(linear.kind, num_tokens, FP8_ROWS, torch.bfloat16, False))
    assert variant.kernel == "swap_ab_stream"
    y = ops.linear(case.rows, linear)
    expected = exact(case.case)
    assert ((y.double() - expected).abs() <= tolerance(case.case, expected, "cuda")).all()
    assert linear.counters is not None and not linear.counters.any()


def test_too_few_counters_are_refused() -> None:
    rows = ops.quantize_fp8(torch.ones(40, 256).bfloat16())
    weight, scales = torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.ones(256)
    with pytest.raises(ValueError, match="counters: 7, expected 4 for each of 2 tiles"):
        cuda_stream.swap_ab_stream(rows, weight, scales, None, Plan(128, 2, 4), torch.zeros(7, dtype=torch.int32))


@pytest.mark.parametrize("columns", cuda_stream.COLUMNS)
def test_compiles_without_spills(columns: int) -> None:
    assert_compiles_well(cuda_stream.SOURCE, cuda_stream.defines(columns))
