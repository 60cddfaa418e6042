"""Products with MXFP4 weights, dense and of experts, against the format's definition number by number in fp64."""

from __future__ import annotations

import emulation
import pytest
import torch
from expert_cases import check, logits_of
from hopper import assert_compiles_well
from slipstream_kernels import ops
from slipstream_kernels.gemm.int4_checks import check_int4
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda import grouped_gemm, grouped_mxfp4_gemm, grouped_mxfp4_wide
from slipstream_kernels.moe.grouped_mxfp4_layout import repack_experts, unpack_experts
from slipstream_kernels.moe.triton.dequantise_mxfp4 import dequantise_mxfp4
from tolerances import INT_MM

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(
    out_features: int, in_features: int, device: torch.device, extremes: tuple[int, ...] = ()
) -> tuple[Int4Weight, torch.Tensor]:
    """(weight, its numbers in fp64): all codes, and scales from 2^-9 to 2^-2.  extremes: scales of the first rows."""
    codes = torch.randint(16, (out_features, in_features), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 126, (out_features, in_features // 32), dtype=torch.uint8, device=device)
    scales[: len(extremes)] = torch.tensor(extremes, dtype=torch.uint8, device=device)[:, None]
    weight = Int4Weight(ops.pack_int4(codes), scales, None, 32, out_features, in_features, is_e2m1=True)
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64, device=device)
    factors = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    return weight, values[codes.long()] * factors


@pytest.mark.parametrize("backend", ["reference", "triton", "auto"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 80, 160), (17, 66, 2880)])
def test_dense(device, shape, dtype, backend) -> None:
    """2880: the last block of 128 input features has half of them."""
    torch.manual_seed(0)
    num_tokens, out_features, in_features = shape
    weight, values = drawn(out_features, in_features, device)
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    y = ops.int4_mm(x, weight, backend=backend).double()
    expected = x.double() @ values.t()
    # Only results are rounded; the interpreter truncates them to bf16, up to 2^-7.
    limit = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    assert (y - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("backend", ["reference", "triton", "auto"])
@pytest.mark.parametrize(("by_token", "gated"), [(True, True), (False, False)])
def test_experts(device, by_token, gated, backend) -> None:
    torch.manual_seed(0)
    num_experts, out_features, in_features = 5, 34, 160
    routing = ops.route_experts(logits_of(9, num_experts, device), 2)
    weight, values = drawn(num_experts * out_features, in_features, device)
    x = torch.randn(9 if by_token else routing.num_rows, in_features, device=device).bfloat16()
    y = ops.grouped_int4_mm(x, weight, routing, by_token=by_token, gated=gated, backend=backend)
    limits = INT_MM[torch.device(device).type, torch.bfloat16]
    check(y, x.double(), values.view(num_experts, out_features, in_features), routing, by_token, gated, limits)


# tokens, experts, top_k, out, in, variant: experts without rows and of several tiles, features that end within a CTA,
# inputs that end within a unit, a stage and a team's share, and teams without any
FEWEST, FEW, FEW_OF_MANY, MORE = grouped_mxfp4_gemm.VARIANTS
GEMM_SHAPES = [
    (1, 4, 2, 32, 2880, FEWEST), (9, 3, 2, 64, 32, FEWEST), (30, 3, 2, 160, 160, FEW), (12, 40, 2, 96, 1184, FEW),
    (45, 3, 2, 128, 544, FEW_OF_MANY), (20, 3, 2, 160, 1184, MORE), (57, 3, 2, 96, 800, MORE),
]  # fmt: skip


def gemm_case(shape: tuple[int, ...], by_token: bool, device: torch.device):
    """(rows of x, weight, its numbers of each expert, routing)"""
    torch.manual_seed(sum(shape[:5]))
    num_tokens, num_experts, top_k, out_features, in_features, _ = shape
    routing = ops.route_experts(logits_of(num_tokens, num_experts, device), top_k)
    weight, values = drawn(num_experts * out_features, in_features, device, extremes=(160, 40))
    x = torch.randn(num_tokens if by_token else routing.num_rows, in_features, device=device).bfloat16()
    return x, weight, values.view(num_experts, out_features, in_features), routing


@pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_the_kernel_of_few_rows_thread_by_thread(shape) -> None:
    """Its device code on the CPU."""
    by_token, variant = shape[0] != 30, shape[-1]
    x, weight, values, routing = gemm_case(shape, by_token, torch.device("cpu"))
    out = torch.full((routing.num_rows, shape[3]), float("nan"), dtype=torch.bfloat16)
    repacked = repack_experts(weight, shape[1])
    params = grouped_mxfp4_gemm.arguments(x, repacked, routing, out, variant.columns, by_token=by_token)
    emulation.run("emulate_grouped_mxfp4.cc", grouped_mxfp4_gemm.defines(variant), params, seed=sum(shape[:5]))
    check(out, x.double(), values, routing, by_token, False, INT_MM["cpu", torch.bfloat16])


@pytest.mark.parametrize("variant", grouped_mxfp4_gemm.VARIANTS)
def test_the_kernel_of_few_rows_compiles_without_spills(variant) -> None:
    assert_compiles_well(grouped_mxfp4_gemm.SOURCE, grouped_mxfp4_gemm.defines(variant))


@pytest.mark.parametrize("variant", grouped_mxfp4_gemm.VARIANTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "shape",
    [*GEMM_SHAPES, (64, 32, 4, 512, 2880, None), (5, 128, 4, 576, 2880, None), (200, 32, 4, 576, 2880, None)],
    ids=str,
)
def test_the_kernel_of_few_rows(hopper, shape, gated, variant) -> None:
    x, canonical, values, routing = gemm_case(shape, gated, hopper)
    weight = ops.repack_expert_int4(canonical, shape[1])
    assert weight.is_repacked
    y = grouped_mxfp4_gemm.grouped_int4_mm(x, weight, routing, gated, gated, variant)
    check(y, x.double(), values, routing, gated, gated, INT_MM["cuda", torch.bfloat16])
    assert torch.equal(y, grouped_mxfp4_gemm.grouped_int4_mm(x, weight, routing, gated, gated, variant))


# tokens, experts, top_k, out, in, variant: experts of several tiles, of one row and of none, features that end within a
# warpgroup's, inputs that end within a unit, and rings that are filled more than once and not at all
WIDE_SHAPES = [
    (20, 3, 2, 160, 1184), (57, 3, 2, 96, 544), (9, 40, 2, 64, 32), (120, 3, 2, 32, 160), (3, 2, 1, 224, 96),
]  # fmt: skip


@pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
@pytest.mark.parametrize("variant", grouped_mxfp4_wide.VARIANTS)
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
def test_the_wide_kernel_thread_by_thread(shape, variant) -> None:
    """Its device code on the CPU, the permutation of rows before it too."""
    by_token = shape[0] != 57
    x, weight, values, routing = gemm_case((*shape, None), by_token, torch.device("cpu"))
    out = torch.full((routing.num_rows, shape[3]), float("nan"), dtype=torch.bfloat16)
    repacked = repack_experts(weight, shape[1])
    kernel = grouped_mxfp4_wide.kernel_of(x, repacked, routing, False, variant)
    params, workspaces = grouped_gemm.arguments(x, repacked, routing, kernel, out, by_token=by_token)
    workspaces[0].fill_(0xFF)  # NaN
    emulation.run("emulate_grouped_wide.cc", kernel.defines, params, seed=sum(shape))
    check(out, x.double(), values, routing, by_token, False, INT_MM["cpu", torch.bfloat16])


@pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
@pytest.mark.parametrize("gated", [False, True])
def test_the_wide_kernel_as_it_is_called(monkeypatch, gated) -> None:
    """Its launch on the CPU, by the sizes' own variant; the gate is applied behind it."""
    monkeypatch.setattr(grouped_gemm, "count_sms", lambda device: 132)
    monkeypatch.setattr(grouped_gemm, "launches_dependently", lambda device: False)
    monkeypatch.setattr(grouped_gemm, "load", lambda source, defines: defines)
    monkeypatch.setattr(
        grouped_gemm,
        "launch",
        lambda entry, defines, params, device: emulation.run("emulate_grouped_wide.cc", defines, params, seed=4),
    )
    x, weight, values, routing = gemm_case((57, 3, 2, 96, 544, None), True, torch.device("cpu"))
    y = grouped_mxfp4_wide.grouped_int4_mm(x, repack_experts(weight, 3), routing, True, gated)
    check(y, x.double(), values, routing, True, gated, INT_MM["cpu", torch.bfloat16])
    with pytest.raises(ValueError, match="not bfloat16"):
        grouped_mxfp4_wide.grouped_int4_mm(x.half(), repack_experts(weight, 3), routing, True, gated)


@pytest.mark.parametrize("variant", grouped_mxfp4_wide.VARIANTS)
def test_the_wide_kernel_compiles_without_spills(variant) -> None:
    assert_compiles_well(grouped_mxfp4_wide.SOURCE, grouped_mxfp4_wide.defines(variant))


@pytest.mark.parametrize("variant", grouped_mxfp4_wide.VARIANTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "shape", [*WIDE_SHAPES, (200, 32, 4, 576, 800), (700, 5, 4, 96, 544), (300, 128, 4, 192, 2880)], ids=str
)
def test_the_wide_kernel(hopper, shape, gated, variant) -> None:
    x, canonical, values, routing = gemm_case((*shape, None), gated, hopper)
    weight = ops.repack_expert_int4(canonical, shape[1])
    y = grouped_mxfp4_wide.grouped_int4_mm(x, weight, routing, gated, gated, variant)
    check(y, x.double(), values, routing, gated, gated, INT_MM["cuda", torch.bfloat16])
    assert torch.equal(y, grouped_mxfp4_wide.grouped_int4_mm(x, weight, routing, gated, gated, variant))


def test_wide_tiles_hold_the_rows_of_most_experts() -> None:
    def chosen(num_tokens: int, num_experts: int) -> int:
        sizes = num_tokens, 4 * num_tokens, num_experts
        return grouped_mxfp4_wide.choose(sizes, 5760, 132).tile_rows

    assert [chosen(tokens, 32) for tokens in (96, 200, 256, 384, 512, 4096)] == [32, 32, 48, 64, 96, 96]
    assert [chosen(tokens, 128) for tokens in (512, 1024)] == [32, 48]


@pytest.mark.parametrize("num_rows", [4, 40, 4096])
def test_repacked_experts_through_the_choice(hopper, num_rows) -> None:
    """4,096 rows are multiplied by weights written out, whose products are of other kernels."""
    x, canonical, values, routing = gemm_case((num_rows // 2, 4, 2, 128, 352, None), True, hopper)
    y = ops.grouped_int4_mm(x, ops.repack_expert_int4(canonical, 4), routing, by_token=True, gated=True)
    check(y, x.double(), values, routing, True, True, INT_MM["cuda", torch.bfloat16])


def test_weights_are_written_out_as_they_are(device) -> None:
    weight, values = drawn(48, 96, device, extremes=(250, 2))
    assert torch.equal(dequantise_mxfp4(weight).double(), values)


@pytest.mark.parametrize("sizes", [(2, 32, 96), (3, 64, 2880), (5, 96, 1184)], ids=str)
def test_repacked_experts_are_written_out_as_they_are(hopper, sizes) -> None:
    num_experts, out_features, in_features = sizes
    weight, values = drawn(num_experts * out_features, in_features, hopper, extremes=(160, 2, 1))
    assert torch.equal(grouped_mxfp4_gemm.written_out(repack_experts(weight, num_experts)).double(), values)


@pytest.mark.parametrize("sizes", [(3, 64, 160), (2, 32, 2880), (1, 96, 32)], ids=str)
def test_repacked_experts_are_the_same_weights(device, sizes) -> None:
    num_experts, out_features, in_features = sizes
    weight, _ = drawn(num_experts * out_features, in_features, device, extremes=(160, 0))
    repacked = repack_experts(weight, num_experts)
    assert repacked.packed.shape == (num_experts * out_features // 32, -(-in_features // 64), 272)
    found = unpack_experts(repacked)
    assert torch.equal(found.packed, weight.packed) and torch.equal(found.scales, weight.scales)


def test_repacked_experts_take_bf16_rows_alone(device) -> None:
    weight, _ = drawn(64, 64, device)
    repacked, routing = repack_experts(weight, 2), ops.route_experts(logits_of(3, 2, device), 1)
    x = torch.randn(3, 64, device=device).half()
    for rows, backend in ((x, "auto"), (x, "cuda"), (x.float(), "cuda"), (ops.quantize_fp8(x.bfloat16()), "cuda")):
        with pytest.raises(ValueError, match="not bfloat16"):
            ops.grouped_int4_mm(rows, repacked, routing, backend=backend)


def test_variants_by_rows_and_ctas() -> None:
    """Tokens that choose 4 of 32 and of 128 experts; products of 5760 and 2880 output features on 132 SMs."""

    def chosen(num_tokens: int, num_experts: int, out_features: int) -> grouped_mxfp4_gemm.Variant:
        return grouped_mxfp4_gemm.choose((num_tokens, 4 * num_tokens, num_experts), out_features, 132)

    assert [chosen(tokens, 32, 5760) for tokens in (1, 2, 4, 42, 43, 4096)] == [FEWEST, FEWEST, FEW, FEW, MORE, MORE]
    assert [chosen(tokens, 128, 5760) for tokens in (2, 8, 64, 170, 171)] == [
        FEWEST,
        FEW,
        FEW_OF_MANY,
        FEW_OF_MANY,
        MORE,
    ]
    assert chosen(64, 128, 2880) == FEW_OF_MANY and chosen(24, 128, 2880) == FEW


def test_the_variant_of_an_sm_count(monkeypatch) -> None:
    """Without one given, as the table of kernels chooses: two teams as long as CTAs are few."""
    taken: list[tuple[str, ...]] = []
    monkeypatch.setattr(grouped_mxfp4_gemm, "load", lambda source, defines: taken.append(defines))
    monkeypatch.setattr(grouped_mxfp4_gemm, "launch", lambda *arguments: None)
    monkeypatch.setattr(grouped_mxfp4_gemm, "launches_dependently", lambda device: False)
    monkeypatch.setattr(grouped_mxfp4_gemm, "count_sms", lambda device: 132)
    x, weight, _, routing = gemm_case((9, 4, 2, 32, 64, None), True, torch.device("cpu"))
    ops.grouped_int4_mm(x, repack_experts(weight, 4), routing, by_token=True, backend="cuda")
    assert taken == [grouped_mxfp4_gemm.defines(FEW)]


def test_the_least_scale_is_a_power_of_two(device) -> None:
    """2^-127 is no normal fp32 number."""
    weight, _ = drawn(16, 64, device)
    weight.scales.zero_()
    found = ops.dequantize_int4(weight).double()
    assert found.abs().max() == 6 * 2.0**-127


def test_what_is_refused(device) -> None:
    weight, _ = drawn(16, 64, device)
    for wrong, message in (
        (Int4Weight(weight.packed, weight.scales.float(), None, 32, 16, 64, is_e2m1=True), "scales: dtype"),
        (Int4Weight(weight.packed, weight.scales, weight.scales, 32, 16, 64, is_e2m1=True), "zeros: e2m1"),
        (
            Int4Weight(weight.packed, weight.scales, None, 32, 16, 64),
            "scales: dtype torch.uint8, expected torch.float32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_int4(wrong)
    assert ops.repack_int4(weight) is weight
    with pytest.raises(ValueError, match="is not multiplied by fp8 rows"):
        ops.int4_mm(ops.quantize_fp8(torch.randn(2, 64, device=device).bfloat16()), weight)
