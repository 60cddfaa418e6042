"""The CUDA kernels of 4-bit weights and FP8 rows on a Hopper GPU: every variant against the reference, the choice."""

from __future__ import annotations

import pytest
import torch
import w4a8_emulator
from hopper import needs_hopper
from int4_weights import weight_of
from slipstream_kernels import ops
from slipstream_kernels.cuda.build import build, find_nvcc
from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm import w4a8_layout
from slipstream_kernels.gemm.choose import variant_of
from slipstream_kernels.gemm.cuda import cutlass_gemm, mixed_gemm_w4a8, w4a8_gemm, w4a8_mm
from slipstream_kernels.integer import Int4Weight

GROUPS = [64, 128, 0]  # 0: whole rows
# (out, in features): one tile and block; CTAs with nothing to do; blocks that do not fill stages; several passes
SIZES = [(16, 128), (208, 384), (320, 13696), (36864, 256)]


def rows_of(num_tokens: int, weight: Int4Weight, dtype: torch.dtype = torch.bfloat16) -> Fp8Rows:
    x = torch.randn(num_tokens, weight.in_features, device="cuda").to(dtype)
    return ops.quantize_fp8(x, Fp8Scheme(sum_columns=w4a8_layout.sum_columns(weight.group_size)))


def relative_error(y: torch.Tensor, rows: Fp8Rows, dense: torch.Tensor, bias: torch.Tensor | None) -> float:
    x = rows.values.double() * rows.scales.double()
    expected = x @ dense.double().t() + (0 if bias is None else bias.double())
    assert y.dtype == rows.dtype and y.shape == expected.shape
    return float((y.double() - expected).norm() / expected.norm())


@needs_hopper
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_variant_of_few_tokens(sizes: tuple[int, int], group_size: int) -> None:
    for has_zeros, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)):
        weight = weight_of(*sizes, group_size, has_zeros)
        repacked, dense = w4a8_layout.repack(weight), ops.dequantize_int4(weight)
        bias = torch.randn(sizes[0], device="cuda").to(dtype) if has_zeros else None
        for num_tokens in (1, 8, 15, 31, 33, 48, 64, 65, 97, 128, 129, 200, 256):
            rows = rows_of(num_tokens, weight, dtype)
            found = list(mixed_gemm_w4a8.candidates(num_tokens, repacked, rows.values.device))
            assert rows.activation_sums is not None
            for variant in (*found, None) if num_tokens <= 64 else found:
                out = torch.full((num_tokens, sizes[0]), torch.nan, dtype=dtype, device="cuda")
                mixed_gemm_w4a8.mixed_gemm_w4a8(
                    rows, repacked, bias, out, activation_sums=rows.activation_sums, variant=variant
                )
                assert relative_error(out, rows, dense, bias) < 4e-3, (num_tokens, variant)


@needs_hopper
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("tile", w4a8_gemm.TILES, ids=str)
def test_many_tokens(tile: cutlass_gemm.Tile, group_size: int) -> None:
    if (reason := w4a8_gemm.refusal(torch.bfloat16)) is not None:
        pytest.skip(reason)
    for has_zeros in (False, True):
        weight = weight_of(336, 1024, group_size, has_zeros)
        repacked = w4a8_layout.repack(weight)
        assert repacked.zeros is not None
        on_cpu = Int4Weight(
            *(t.cpu() for t in (repacked.packed, repacked.scales, repacked.zeros)), group_size or 1024, 336, 1024
        )
        table = w4a8_emulator.table_operand(on_cpu).cuda() * repacked.zeros[:, None]
        for num_tokens in (1, 65, 300):
            rows = rows_of(num_tokens, weight)
            bias = torch.randn(336, device="cuda").bfloat16() if has_zeros else None
            out = torch.full((num_tokens, 336), torch.nan, dtype=torch.bfloat16, device="cuda")
            w4a8_gemm.w4a8_gemm(rows, repacked, bias, out, tile)
            assert relative_error(out, rows, table, bias) < 4e-3, num_tokens


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200])
def test_without_cutlass_rows_are_multiplied_64_at_a_time(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a8_mm, "many_rows_refusal", lambda _: "no headers")
    variant_of.cache_clear()
    weight = weight_of(512, 1024, 128, True)
    rows = rows_of(num_tokens, weight)
    y = ops.int4_mm(rows, ops.repack_int4(weight, for_fp8_rows=True))
    variant_of.cache_clear()
    assert relative_error(y, rows, ops.dequantize_int4(weight), None) < 4e-3


@needs_hopper
@pytest.mark.parametrize(
    ("out_features", "in_features", "most"),
    [(4096, 1024, 128), (8192, 4096, 128), (512, 128, 128), (2048, 8192, 256), (512, 1280, 256)],
)
def test_up_to_256_rows_of_narrow_outputs_are_exact(out_features: int, in_features: int, most: int) -> None:
    weight = weight_of(out_features, in_features, 128, True)
    repacked, dense = ops.repack_int4(weight, for_fp8_rows=True), ops.dequantize_int4(weight)
    for num_tokens in (65, 96, 100, 128, 129, 200, 256)[: 4 if most == 128 else 7]:
        assert mixed_gemm_w4a8.serves(num_tokens, repacked)
        rows = rows_of(num_tokens, weight)
        assert relative_error(ops.int4_mm(rows, repacked), rows, dense, None) < 4e-3, num_tokens
    assert not mixed_gemm_w4a8.serves(most + 1, repacked)


@needs_hopper
@pytest.mark.parametrize("group_size", GROUPS)
def test_rows_bring_their_sums_or_get_them(group_size: int) -> None:
    weight = weight_of(512, 1024, group_size, True)
    repacked = ops.repack_int4(weight, for_fp8_rows=True)
    assert (
        ops.activation_sum_columns(weight) == ops.activation_sum_columns(repacked) == (64 if group_size == 64 else 128)
    )
    x = torch.randn(17, 1024, device="cuda").bfloat16()
    with_sums = ops.quantize_fp8(x, Fp8Scheme(sum_columns=ops.activation_sum_columns(weight)))
    assert torch.equal(ops.int4_mm(with_sums, repacked), ops.int4_mm(ops.quantize_fp8(x), repacked))


def test_weights_of_a_cpu_are_not_served() -> None:
    weight = Int4Weight(torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 1), None, 128, 64, 128)
    assert "cpu" in str(w4a8_mm.refusal(weight))


def test_a_variant_compiles(tmp_path) -> None:
    if find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    assert (
        build(mixed_gemm_w4a8.SOURCE, mixed_gemm_w4a8.format_of(torch.bfloat16, 1).defines(8), tmp_path).stat().st_size
        > 0
    )
