"""Products by clusters: right against fp64 for every variant, the same every run, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hopper import assert_compiles_well, needs_hopper
from kernel_choices import Hopper
from slipstream_kernels import ops
from slipstream_kernels.gemm import tuning
from slipstream_kernels.gemm.choose import choose, plain_rows_of, variant_of
from slipstream_kernels.gemm.cuda import swap_ab_choice
from slipstream_kernels.gemm.cuda import swap_ab_gemm as cuda_cluster
from slipstream_kernels.gemm.product import FP8_ROWS, PLAIN_ROWS, Product, WeightKind
from slipstream_kernels.gemm.tuning import ranges_of
from stream_cases import (
    Case,
    assert_chain_in_a_graph_is_right,
    draw_case,
    exact,
    poison_result,
    quantised,
    swap_ab_shapes,
    tolerance,
)

FORMATS = ("plain", "channel", "block")
TOKENS = (5, 17, 50, 128, 200, 256)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_right(weights: str, gated: bool, dtype: torch.dtype) -> None:
    case = draw_case(Case(5, 48, 256, weights, gated, dtype), torch.device("cpu"))
    x, case = (case.operands[0], case) if weights == "plain" else quantised(case)
    y = ops.swap_ab_gemm(x, *case.operands[1:], gated=gated)
    expected = exact(case)
    assert y.dtype == dtype and ((y.double() - expected).abs() <= tolerance(case, expected)).all()


@needs_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_is_right_for_every_variant(
    dtype: torch.dtype, weights: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_tokens, (out_features, in_features) in itertools.product(TOKENS, swap_ab_shapes(weights)):
        case = draw_case(Case(num_tokens, out_features, in_features, weights, gated, dtype), torch.device("cuda"))
        x, case = (case.operands[0], case) if weights == "plain" else quantised(case)
        expected = exact(case)
        limit = tolerance(case, expected, "cpu" if weights == "plain" else "cuda")
        for variant in variants(case.what):
            monkeypatch.setattr(cuda_cluster, "choose", lambda *_, variant=variant: variant)
            poison_result(case.what)
            y = ops.swap_ab_gemm(x, *case.operands[1:], gated=gated, backend="cuda")
            error = (y.double() - expected).abs() - limit
            assert (error <= 0).all(), f"{variant}, {case.what}: {error.max()} at {error.argmax()}"


def variants(what: Case) -> Iterator[swap_ab_choice.Variant]:
    """All that can serve such a product, but for tiles that are four times too wide."""
    weight = what.dtype if what.weights == "plain" else torch.float8_e4m3fn
    row_bytes = what.in_features * weight.itemsize
    product = swap_ab_choice.Product(what.num_tokens, what.out_features, row_bytes, what.gated)
    for (columns, is_gated), sizes in swap_ab_choice.COMPILED.items():
        if is_gated != what.gated or not what.num_tokens <= columns < max(4 * what.num_tokens, 64):
            continue
        for size in sizes:
            variant = swap_ab_choice.Variant(columns, *size)
            kind = (what.dtype, weight, what.weights == "block")
            count = cuda_cluster.count_clusters(torch.device("cuda:0"), *kind, variant, what.gated)
            if swap_ab_choice.estimate_us(product, variant, count) < float("inf"):
                yield variant


@needs_hopper
@pytest.mark.parametrize("weights", FORMATS)
def test_same_bits_in_every_run(weights: str) -> None:
    case = draw_case(Case(64, 4096, 4096, weights, False, torch.bfloat16), torch.device("cuda"))
    x = case.operands[0] if weights == "plain" else quantised(case)[0]
    first = ops.swap_ab_gemm(x, *case.operands[1:], backend="cuda")
    assert all(torch.equal(ops.swap_ab_gemm(x, *case.operands[1:], backend="cuda"), first) for _ in range(20))


@needs_hopper
@pytest.mark.parametrize("warp", [0, 1, 2, 3])
def test_a_late_producer_warp_is_waited_for(warp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the third warp of weights has no box of any stage. Two rounds late it would wait for ever."""
    defines = cuda_cluster.defines
    monkeypatch.setattr(cuda_cluster, "defines", lambda *kind: (*defines(*kind), f"SLIPSTREAM_LATE_PRODUCER={warp}"))
    case = draw_case(Case(32, 8192, 4096, "channel", False, torch.bfloat16), torch.device("cuda"))
    x, case = quantised(case)
    expected = exact(case)
    monkeypatch.setattr(cuda_cluster, "choose", lambda *_: swap_ab_choice.Variant(32, 1, 2))
    y = ops.swap_ab_gemm(x, *case.operands[1:], backend="cuda")
    assert ((y.double() - expected).abs() <= tolerance(case, expected, "cuda")).all()


@needs_hopper
def test_a_chain_in_a_graph_sees_what_the_kernel_before_wrote() -> None:
    assert_chain_in_a_graph_is_right(partial(ops.swap_ab_gemm, backend="cuda"), num_tokens=40, features=1024)


FP8 = torch.zeros(32, 128).to(torch.float8_e4m3fn)
ROWS = ops.quantize_fp8(torch.ones(2, 128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 100)}, "x: shape"),
        ({"x": torch.zeros(128, 2).t()}, "x: last dimension"),
        ({"x": torch.zeros(2, 128, dtype=torch.int8)}, "x: dtype"),
        ({"weight": torch.zeros(32, 128).bfloat16()}, "weight: dtype torch.bfloat16, expected x's"),
        ({"weight": FP8}, "weight: dtype torch.float8_e4m3fn, expected x's"),
        ({"weight": torch.zeros(128, 32).t()}, "weight: shape"),
        ({"scales": torch.ones(32)}, "scales: a weight of torch.float32 has none"),
        ({"x": ROWS}, "weight: dtype torch.float32, expected torch.float8_e4m3fn"),
        ({"x": ROWS, "weight": FP8}, "scales: a weight of torch.float8_e4m3fn needs"),
        ({"x": ROWS, "weight": FP8, "scales": torch.ones(31)}, "scales: shape"),
        ({"x": ROWS, "weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}, "x: shape"),
        ({"bias": torch.zeros(31)}, "bias: shape"),
        ({"bias": torch.zeros(32).half()}, "bias: dtype"),
        ({"weight": torch.zeros(33, 128), "gated": True}, "weight: 33 rows"),
        ({"backend": "triton"}, "backend: 'triton'"),
        ({"backend": "cuda"}, "backend: cuda cannot run swap_ab_gemm: weight is on cpu"),
        ({"x": torch.zeros(300, 128), "backend": "cuda"}, "300 tokens are more than 256"),
    ],
)
def test_refuses_by_name(change: dict[str, object], message: str) -> None:
    call = {"x": torch.zeros(2, 128), "weight": torch.zeros(32, 128), **change}
    with pytest.raises(ValueError, match=message):
        ops.swap_ab_gemm(**call)


H200 = {1: 132, 2: 66, 4: 30}  # clusters that run at once, by their size


def test_choice_can_run_for_every_size() -> None:
    sizes = itertools.product((1, 17, 64, 65, 256), (16, 4096, 6144, 28672, 128256), (512, 4096, 28672), (False, True))
    for num_tokens, out_features, row_bytes, gated in sizes:
        product = swap_ab_choice.Product(num_tokens, out_features, row_bytes, gated)
        variant = swap_ab_choice.choose(product, lambda variant: H200[variant.splits])
        assert variant[1:] in swap_ab_choice.COMPILED[variant.columns, gated] and variant.columns >= num_tokens
        assert swap_ab_choice.estimate_us(product, variant, H200[variant.splits]) < float("inf")


def test_is_chosen_where_it_was_measured_to_be_faster() -> None:
    def is_chosen(num_tokens: int, out_features: int, row_bytes: int, weights: str, gated: bool = False) -> bool:
        """weights: "plain" (16 bits), or "fp8" and "fp8_block" beside e4m3 rows."""
        rows, dtype = (PLAIN_ROWS, torch.bfloat16) if weights == "plain" else (FP8_ROWS, torch.float8_e4m3fn)
        kind = WeightKind(weights, out_features, row_bytes // dtype.itemsize, dtype, torch.device("meta"), rows=rows)
        product = Product(kind, num_tokens, rows, torch.bfloat16, gated)
        return choose(product, Hopper(132)).kernel == "swap_ab_gemm"

    assert is_chosen(48, 28672, 8192, "plain", gated=True) and not is_chosen(96, 28672, 8192, "plain", gated=True)
    assert not is_chosen(64, 4096, 8192, "plain") and not is_chosen(64, 128256, 8192, "plain")
    assert is_chosen(128, 4096, 4096, "fp8") and not is_chosen(128, 4096, 4096, "fp8_block")
    assert is_chosen(9, 28672, 4096, "fp8", gated=True) and not is_chosen(9, 4096, 4096, "fp8")
    assert is_chosen(16, 7168, 16384, "fp8_block") and is_chosen(48, 36864, 7168, "fp8_block", gated=True)
    assert is_chosen(16, 22016, 4096, "plain", gated=True) and not is_chosen(16, 28672, 8192, "plain", gated=True)
    for weights, columns in (("plain", [16, 32, 64]), ("fp8", [16, 32, 64, 128]), ("fp8_block", [16, 32, 64])):
        assert swap_ab_choice.columns_of(ranges_of("NVIDIA H200", weights, "swap_ab_gemm")) == columns
    weight = ops.plain_weight(torch.zeros(32, 128)).kind
    assert variant_of(Product(weight, 64, PLAIN_ROWS, torch.float32)).kernel == "library"


def test_long_rows_are_quantised_from_the_first_on() -> None:
    """skinny_gemm holds the rows of 4096 features, and reads longer ones again for each pass."""

    def most_plain(out_features: int, in_features: int, weights: str = "fp8") -> int:
        kind = WeightKind(weights, out_features, in_features, torch.float8_e4m3fn, torch.device("meta"), rows=FP8_ROWS)
        return plain_rows_of(kind, 8, Hopper(132))

    assert most_plain(27392, 5120) == most_plain(15360, 5120) == most_plain(10240, 8192) == 0
    assert most_plain(28672, 4096) == most_plain(5120, 13824) == most_plain(27392, 5120, "fp8_block") == 8


def test_few_rows_share_sums_as_widely_as_more() -> None:
    """A tile of 16 tokens has two groups of 8, so that four CTAs cannot finish one each."""
    product = swap_ab_choice.Product(16, 4096, 4096, False)
    costs = tuning.H200.swap_ab_fp8
    assert swap_ab_choice.choose(product, lambda variant: H200[variant.splits], costs) == (32, 2, 4)
    wide = product._replace(out_features=57344)
    assert swap_ab_choice.choose(wide, lambda variant: H200[variant.splits], costs).columns == 16


def test_narrow_products_share_sums() -> None:
    """4096 weight rows are 31 for each of 132 SMs: alone they would read as many activations as weights, or more."""
    product = swap_ab_choice.Product(64, 4096, 14336, False)
    assert swap_ab_choice.choose(product, lambda variant: H200[variant.splits]).splits > 1
    wide = swap_ab_choice.Product(64, 28672, 4096, False)
    assert swap_ab_choice.choose(wide, lambda variant: H200[variant.splits]).splits == 1


def test_compiles_without_spills() -> None:
    assert_compiles_well(cuda_cluster.SOURCE, cuda_cluster.defines(torch.bfloat16, torch.float8_e4m3fn, False, 64))
