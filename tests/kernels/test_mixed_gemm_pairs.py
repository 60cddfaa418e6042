"""bf16 rows as pairs of e4m3 rows beside 4-bit weights: what a pair loses, products thread by thread, and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import emulation
import kernel_choices
import pytest
import torch
from hopper import CLUSTERS_AT_ONCE, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.choose import choose
from slipstream_kernels.gemm.cuda import mixed_gemm, mixed_gemm_pairs, mixed_gemm_w4a16
from slipstream_kernels.gemm.cuda.mixed_gemm import MixedGemmParams, Variant
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product, WeightKind
from slipstream_kernels.integer import Int4Weight

SIZES = [(6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672), (37888, 3584), (16, 128), (96, 256)]
MOST_ERROR = 3e-3  # of a result's norm: bf16's rounding takes 1.7e-3
needs_emulator = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))


def weight_of(size: tuple[int, int], group_size: int, device: str) -> Int4Weight:
    """group_size: 0: whole rows."""
    groups = (size[0], size[1] // (group_size or size[1]))
    packed = torch.randint(256, (size[0], size[1] // 2), dtype=torch.uint8, device=device)
    scales = ((0.5 + torch.rand(groups, device=device)) * size[1] ** -0.5 / 4).bfloat16().float()
    zeros = torch.randint(17, groups, dtype=torch.uint8, device=device)
    return Int4Weight(packed, scales, zeros, group_size or size[1], *size)


def rows_of(num_tokens: int, in_features: int, device: str) -> torch.Tensor:
    """Rows that are not dense."""
    return torch.randn(num_tokens, in_features + 8, device=device).bfloat16()[:, :in_features]


def expected_of(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ ops.dequantize_int4(weight).double().t()
    return y if bias is None else y + bias.double()


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


Launch = Callable[[str, tuple[str, ...], MixedGemmParams, torch.device], None]


def emulate(monkeypatch: pytest.MonkeyPatch, num_ctas: int, launch: Launch | None = None) -> None:
    """From now on products run on the CPU."""

    def run(name: str, defines: tuple[str, ...], params: MixedGemmParams, device: torch.device) -> None:
        emulation.run("emulate_mixed_gemm.cc", defines, params, seed=params.num_tokens)

    monkeypatch.setattr(mixed_gemm_w4a16, "launch", launch or run)
    monkeypatch.setattr(mixed_gemm_w4a16, "load", lambda source, defines: defines)
    monkeypatch.setattr(mixed_gemm_w4a16, "clusters_at_once", lambda *_: num_ctas)
    monkeypatch.setattr(mixed_gemm_w4a16, "launches_dependently", lambda device: False)
    monkeypatch.setattr(mixed_gemm_w4a16, "copy_pace", lambda device: 0)


def pairs_of(
    x: torch.Tensor, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first, second, sum of a group, scale of a group) as split_rows leaves them, in the order of x; fp64."""
    (num_tokens, in_features), kept = x.shape, []
    variant = Variant(mixed_gemm_pairs.columns_of(num_tokens), 1, 1)

    def launch(name: str, defines: tuple[str, ...], params: MixedGemmParams, device: torch.device) -> None:
        emulation.run("emulate_mixed_gemm.cc", defines, params, seed=1)
        sums_bytes = 4 * variant.columns * in_features // group_size
        kept.append(ctypes.string_at(params.permuted_x, variant.columns * in_features))
        kept.append(ctypes.string_at(params.activation_sums, sums_bytes))

    emulate(monkeypatch, 1, launch)
    weight, out = weight_of((16, in_features), group_size, "cpu"), torch.empty(num_tokens, 16).bfloat16()
    mixed_gemm_pairs.mixed_gemm_pairs(x, int4_layout.repack(weight), None, out, variant)
    columns = torch.frombuffer(bytearray(kept[0]), dtype=E4M3).double().view(variant.columns, -1, 2, 4, 2, 2)
    # axes: 32 features, h, t, b / 2, b % 2 of 16 (b / 2) + 4 t + 2 (b % 2) + h
    values = columns.permute(0, 1, 4, 3, 5, 2).reshape(variant.columns, in_features)
    sums = torch.frombuffer(bytearray(kept[1]), dtype=torch.float32).double().view(-1, variant.columns // 2, 2)
    places = [place // 2 for place in map(partial(first_column, variant.columns), range(num_tokens))]
    first, second = values.view(-1, 2, in_features)[places].unbind(1)
    return first, second, sums[:, places, 0].t(), sums[:, places, 1].t()


def first_column(columns: int, token: int) -> int:
    """As first_column_of of split_rows.cuh."""
    return 2 * token if columns == 8 else token // 8 * 16 + token % 2 * 8 + token % 8 // 2 * 2


def hard_rows() -> torch.Tensor:
    """[4, 256]: ordinary numbers, any finite bits, zeros and subnormal ones, ordinary ones beside a huge one."""
    torch.manual_seed(0)
    bits = torch.randint(1 << 16, (256,))
    any_finite = torch.where((bits & 0x7F80) == 0x7F80, bits & 0x807F, bits).to(torch.int16).view(torch.bfloat16)
    small = torch.randint(1 << 9, (256,)).to(torch.int16).view(torch.bfloat16)
    small[:128] = 0
    outlier = torch.randn(256).bfloat16()
    outlier[77] = -3e5
    return torch.stack((torch.randn(256).bfloat16(), any_finite, small, outlier))


@needs_emulator
@pytest.mark.parametrize("group_size", [64, 128])
def test_pairs_are_the_rows(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = hard_rows()
    first, second, sums, scales = pairs_of(x, group_size, monkeypatch)
    wanted = x.double()
    of_features = scales.repeat_interleave(group_size, dim=1)
    found = of_features * (first + second / 16)
    assert (torch.frexp(scales).mantissa == 0.5).all()  # powers of two
    assert ((found - wanted).abs() <= 2.0**-14 * of_features).all()
    is_exact = wanted.abs() >= 2.0**-6 * of_features
    assert torch.equal(found[is_exact], wanted[is_exact]) and is_exact[0].sum() > 250
    largest = wanted.unflatten(1, (-1, group_size)).abs().amax(2)
    assert (largest < 256 * scales).all() and ((largest >= 128 * scales) | (scales == 2.0**-126)).all()
    exact_sums = (wanted / of_features).unflatten(1, (-1, group_size)).sum(2)
    assert torch.allclose(sums, exact_sums, rtol=1e-5, atol=1e-3)


@needs_emulator
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, 2)
    weight, x = weight_of((48, 256), 128, "cpu"), torch.randn(3, 256).bfloat16()
    x[1, 200] = wrong
    out = torch.empty(3, 48).bfloat16()
    mixed_gemm_pairs.mixed_gemm_pairs(x, int4_layout.repack(weight), None, out, Variant(8, 1, 1))
    assert not out[1].isfinite().any() and out[[0, 2]].isfinite().all()


@needs_emulator
@pytest.mark.parametrize(
    ("size", "group_size", "num_tokens", "variant", "num_ctas"),
    [
        ((48, 384), 128, 3, Variant(8, 1, 1), 2),  # every second place of eight, warpgroups that divide features
        ((544, 256), 0, 4, Variant(8, 4, 1), 1),  # whole rows, three passes
        ((96, 256), 64, 7, Variant(16, 2, 1), 1),  # two groups of a block
        ((112, 512), 128, 9, Variant(32, 1, 1), 3),
        ((304, 256), 0, 16, Variant(32, 4, 1), 1),  # two passes
        ((80, 384), 64, 23, Variant(48, 2, 1), 1),
    ],
    ids=str,
)
def test_thread_by_thread(
    size: tuple[int, int],
    group_size: int,
    num_tokens: int,
    variant: Variant,
    num_ctas: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its device code on the CPU."""
    torch.manual_seed(num_tokens)
    emulate(monkeypatch, num_ctas)
    weight, x, bias = weight_of(size, group_size, "cpu"), rows_of(num_tokens, size[1], "cpu"), torch.randn(size[0])
    expected, out = expected_of(x, weight, bias.bfloat16()), torch.full((num_tokens, size[0]), float("nan")).bfloat16()
    mixed_gemm_pairs.mixed_gemm_pairs(x, int4_layout.repack(weight), bias.bfloat16(), out, variant)
    assert torch.allclose(out.double(), expected, rtol=2.0**-8, atol=1e-5 * float(expected.norm()))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_is_chosen_can_run(size: tuple[int, int]) -> None:
    def at_once(variant: Variant) -> int:
        return CLUSTERS_AT_ONCE[variant.splits]

    for num_tokens in (1, 4, 5, 8, 9, 16, 17, 24, 32):
        variant = mixed_gemm_pairs.choose(num_tokens, size, at_once)
        assert variant is not None and variant in list(mixed_gemm_pairs.candidates(num_tokens, size, at_once))
        assert variant.columns >= 2 * num_tokens
    assert mixed_gemm_pairs.choose(33, size, at_once) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_bf16_alone(gated: bool, dtype: torch.dtype) -> None:
    """fp16 has 11 bits."""
    kind = WeightKind("w4a16", 8192, 4096, torch.int32, torch.device("cuda", 0), 128)
    found = choose(Product(kind, 8, PLAIN_ROWS, dtype, gated), kernel_choices.Hopper(132))
    assert found.kernel == "mixed_gemm_pairs" and found.is_gated == gated
    reason = KERNELS["mixed_gemm_pairs"].refusal(Product(kind, 8, PLAIN_ROWS, dtype, gated))
    assert (reason is None) == (dtype == torch.bfloat16)


@needs_hopper
@pytest.mark.parametrize("group_size", [64, 128, 0])
@pytest.mark.parametrize("size", [(592, 1152), (96, 128), (36864, 256), (4096, 14336)], ids=str)
def test_every_variant(size: tuple[int, int], group_size: int) -> None:
    weight = weight_of(size, group_size, "cuda")
    repacked, bias = int4_layout.repack(weight), torch.randn(size[0], device="cuda").bfloat16()
    kind = mixed_gemm_pairs.format_of(torch.bfloat16, int4_layout.groups_per_block(group_size))
    at_once = partial(mixed_gemm.clusters_at_once, bias.device, kind)
    for num_tokens in (1, 3, 4, 5, 8, 11, 16, 24, 32):
        x = rows_of(num_tokens, size[1], "cuda")
        expected = expected_of(x, weight, bias)
        for variant in mixed_gemm_pairs.candidates(num_tokens, size, at_once):
            out = torch.full(expected.shape, float("nan"), device="cuda").bfloat16()
            mixed_gemm_pairs.mixed_gemm_pairs(x, repacked, bias, out, variant)
            assert error_of(out, expected) < MOST_ERROR, (num_tokens, variant)


@needs_hopper
def test_gated_by_another_launch() -> None:
    weight = weight_of((16384, 2048), 128, "cuda")
    x = rows_of(8, 2048, "cuda")
    gate, up = expected_of(x, weight, None).chunk(2, dim=1)
    out = ops.int4_mm(x, ops.repack_int4(weight), gated=True)
    assert error_of(out, torch.nn.functional.silu(gate) * up) < 5e-3  # two ops, each of which rounds


@needs_hopper
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_sums_of_rows_with_a_mean(mean: float) -> None:
    """The tensor cores add e4m3 products with 14 bits: no more is lost than by three quarters of bf16's rounding."""
    weight = weight_of((4096, 4096), 128, "cuda")
    x = (rows_of(16, 4096, "cuda") + mean).bfloat16()
    expected, out = expected_of(x, weight, None), torch.empty(16, 4096, device="cuda").bfloat16()
    mixed_gemm_pairs.mixed_gemm_pairs(x, int4_layout.repack(weight), None, out, Variant(32, 1, 2))
    assert error_of(out, expected) < 1.25 * error_of(expected.bfloat16(), expected)


@needs_hopper
def test_a_row_does_not_depend_on_the_others() -> None:
    weight, x = int4_layout.repack(weight_of((4096, 4096), 128, "cuda")), rows_of(16, 4096, "cuda")
    x[3] *= 1000
    out = torch.empty(16, 4096, device="cuda").bfloat16()
    mixed_gemm_pairs.mixed_gemm_pairs(x, weight, None, out, Variant(32, 1, 2))
    for token in range(16):
        alone = torch.empty(1, 4096, device="cuda").bfloat16()
        mixed_gemm_pairs.mixed_gemm_pairs(x[token : token + 1], weight, None, alone, Variant(8, 1, 2))
        assert torch.equal(alone[0], out[token]), token


@needs_hopper
def test_results_are_the_same_each_time() -> None:
    weight, x = int4_layout.repack(weight_of((6144, 4096), 128, "cuda")), rows_of(8, 4096, "cuda")
    results = [torch.empty(8, 6144, device="cuda").bfloat16() for _ in range(100)]
    for out in results:
        mixed_gemm_pairs.mixed_gemm_pairs(x, weight, None, out, Variant(16, 2, 2))
    assert all(torch.equal(out, results[0]) for out in results)
