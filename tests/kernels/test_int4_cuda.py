"""The CUDA kernels of 4-bit weights and 16-bit rows on a Hopper GPU against the reference, and what is refused.

More than 16 rows: test_mixed_gemm.py.  The operation with FP8 rows, too; their kernels: test_w4a8_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
from hopper import needs_hopper
from int4_weights import weight_of
from slipstream_kernels import ops
from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.build import build, find_nvcc
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda import cutlass_gemm, int4_mm, int8_gemm, skinny_gemm_w4a16, w4a8_gemm
from slipstream_kernels.integer import Int4Weight

GROUPS = [64, 128, 0]  # 0: whole rows
KINDS = ["bf16", "fp16", "fp8"]
# (out, in features): one tile and block; a tile that is not full; a chunk of blocks that is not full; many CTAs
SIZES = [(16, 256), (208, 384), (320, 13696), (6160, 1024)]


def operand_of(kind: str, num_tokens: int, in_features: int) -> torch.Tensor | Fp8Rows:
    x = torch.randn(num_tokens, in_features, device="cuda").to(torch.float16 if kind == "fp16" else torch.bfloat16)
    return ops.quantize_fp8(x) if kind == "fp8" else x


def relative_error(y: torch.Tensor, x: torch.Tensor | Fp8Rows, dense: torch.Tensor, bias: torch.Tensor | None) -> float:
    rows = x.values.double() * x.scales.double() if isinstance(x, Fp8Rows) else x.double()
    expected = rows @ dense.double().t() + (0 if bias is None else bias.double())
    assert y.dtype == x.dtype and y.shape == expected.shape
    return float((y.double() - expected).norm() / expected.norm())


@needs_hopper
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_few_tokens(sizes, group_size, kind) -> None:
    for has_zeros in (False, True):
        weight = weight_of(*sizes, group_size, has_zeros)
        repacked, dense = int4_layout.repack(weight), ops.dequantize_int4(weight)
        for num_tokens in (1, 7, 8, 15, 16):
            x = operand_of(kind, num_tokens, sizes[1])
            bias = torch.randn(sizes[0], device="cuda").to(x.dtype) if has_zeros else None
            out = torch.full((num_tokens, sizes[0]), torch.nan, dtype=x.dtype, device="cuda")
            skinny_gemm_w4a16.skinny_gemm_w4a16(x, repacked, bias, out)
            assert relative_error(out, x, dense, bias) < 3e-3, num_tokens


@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("sizes", [(32, 256), (416, 384), (12320, 1024)], ids=str)
def test_gated(sizes, group_size, kind) -> None:
    weight = weight_of(*sizes, group_size, True)
    repacked, half = ops.repack_int4(weight, for_fp8_rows=kind == "fp8"), sizes[0] // 2
    for num_tokens in (1, 8, 9, 16):
        x = operand_of(kind, num_tokens, sizes[1])
        bias = torch.randn(sizes[0], device="cuda").to(x.dtype)
        out = ops.int4_mm(x, repacked, bias, gated=True).double()
        rows = x.values.double() * x.scales.double() if isinstance(x, Fp8Rows) else x.double()
        y = rows @ ops.dequantize_int4(weight).double().t() + bias.double()
        expected = torch.nn.functional.silu(y[:, :half]) * y[:, half:]
        limit = 1e-2 if kind == "fp8" else 5e-3  # two ops, each of which rounds
        assert out.shape == expected.shape and (out - expected).norm() / expected.norm() < limit, num_tokens


@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_the_operation_serves_any_number_of_tokens(kind) -> None:
    weight = weight_of(512, 1024, 128, True)
    repacked, dense = ops.repack_int4(weight, for_fp8_rows=kind == "fp8"), ops.dequantize_int4(weight)
    assert repacked.is_repacked and repacked.is_for_fp8_rows == (kind == "fp8")
    for num_tokens in (0, 1, 16, 17, 64, 65, 256, 257, 1000):
        x = operand_of(kind, num_tokens, 1024)
        y = ops.int4_mm(x, repacked)
        if num_tokens:
            # the table's rounding: of many FP8 rows only
            assert relative_error(y, x, dense, None) < (0.035 if kind == "fp8" and num_tokens > 64 else 5e-3)


@needs_hopper
@pytest.mark.parametrize("group_size", GROUPS)
def test_dequantise_is_the_reference(group_size) -> None:
    for sizes in SIZES:
        weight = weight_of(*sizes, group_size, True)
        for dtype in (torch.bfloat16, torch.float16):
            dense = int4_mm.dequantise(int4_layout.repack(weight), dtype)
            assert torch.equal(dense, ops.dequantize_int4(weight).to(dtype))


@needs_hopper
def test_results_are_the_same_each_time() -> None:
    weight = int4_layout.repack(weight_of(4096, 4096, 128, True))
    x = operand_of("bf16", 33, 4096)
    first = ops.int4_mm(x, weight)
    assert all(torch.equal(ops.int4_mm(x, weight), first) for _ in range(20))


@needs_hopper
def test_what_is_not_served() -> None:
    weight = weight_of(64, 256, 128, False)
    with pytest.raises(ValueError, match=r"rows are torch\.float32"):
        ops.int4_mm(torch.randn(2, 256, device="cuda"), ops.repack_int4(weight))
    with pytest.raises(ValueError, match="backend: "):
        ops.int4_mm(operand_of("bf16", 2, 256), ops.repack_int4(weight), backend="triton")
    with pytest.raises(ValueError, match="weight: repacked for 16-bit rows"):
        ops.int4_mm(operand_of("fp8", 2, 256), ops.repack_int4(weight))
    with pytest.raises(ValueError, match="weight: repacked for FP8 rows"):
        ops.int4_mm(operand_of("bf16", 2, 256), ops.repack_int4(weight, for_fp8_rows=True))
    for sizes in [(72, 256, 128), (64, 192, 64), (64, 256, 32)]:
        for for_fp8_rows in (False, True):
            assert not ops.repack_int4(weight_of(*sizes, False), for_fp8_rows=for_fp8_rows).is_repacked


@needs_hopper
@pytest.mark.parametrize("tile", int8_gemm.TILES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 64, 128), (130, 208, 384), (300, 4096, 1024)], ids=str)
def test_many_int8_tokens_are_exact(sizes, tile) -> None:
    num_tokens, out_features, in_features = sizes
    rows = ops.quantize_int8(torch.randn(num_tokens, in_features, device="cuda").bfloat16())
    values = torch.randint(-127, 128, (out_features, in_features), device="cuda").to(torch.int8)
    scales, bias = torch.rand(out_features, device="cuda") / 100, torch.randn(out_features, device="cuda").bfloat16()
    if (reason := int8_gemm.refusal(rows, values)) is not None:
        pytest.skip(reason)
    y = int8_gemm.int8_gemm(rows, values, scales, bias, tile).float()
    expected = ops.int8_mm(rows, values, scales, bias, backend="reference").float()
    assert ((y - expected).abs() <= 2**-7 * expected.abs() + 1e-4).all()  # two products in another order


def test_int8_weights_of_a_cpu_are_not_for_cutlass() -> None:
    rows = ops.quantize_int8(torch.randn(2, 64))
    with pytest.raises(ValueError, match="backend: cuda cannot run int8_mm: the weight is on cpu"):
        ops.int8_mm(rows, torch.zeros(16, 64, dtype=torch.int8), torch.ones(16), backend="cuda")


def test_weights_of_a_cpu_stay_canonical() -> None:
    weight = Int4Weight(torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 1), None, 128, 64, 128)
    assert ops.repack_int4(weight) is weight and "cpu" in str(int4_mm.refusal(weight))


@pytest.mark.parametrize("source", [skinny_gemm_w4a16.SOURCE, int4_mm.DEQUANTISE])
def test_sources_compile(source, tmp_path) -> None:
    if find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    defines = skinny_gemm_w4a16.defines(torch.bfloat16) if source == skinny_gemm_w4a16.SOURCE else ()
    assert build(source, defines, tmp_path).stat().st_size > 0


def test_one_cutlass_configuration_compiles(tmp_path) -> None:
    """A minute of compiling, so only where somebody fetched the headers."""
    if find_nvcc() is None or (cutlass.missing()) is not None:
        pytest.skip(cutlass.missing() or "nvcc is not installed")
    defines = w4a8_gemm.defines(w4a8_gemm.NARROW, 1, torch.bfloat16)
    library = build(w4a8_gemm.SOURCE, defines, tmp_path, flags=cutlass.FLAGS, headers=cutlass.include_folder)
    assert library.stat().st_size > 0


def test_the_choice_of_a_tile_follows_waves() -> None:
    for module, cost in ((w4a8_gemm, 0.75), (int8_gemm, 0.57)):
        assert cutlass_gemm.choose_tile(module.TILES, 4096, 4096, 132, cost) == module.WIDE
        assert cutlass_gemm.choose_tile(module.TILES, 128, 4096, 132, cost) == module.NARROW
        assert cutlass_gemm.choose_tile(module.TILES, 128, 4096, 132, narrow_cost=1.0) == module.WIDE


def test_missing_headers_are_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(cutlass, "find_spec", lambda _: None)
    assert "slipstream_kernels.cuda.cutlass" in str(cutlass.missing()) and "CUTLASS_PATH" in str(cutlass.missing())
    headers = tmp_path / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "cutlass.h").touch()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    assert cutlass.include_folder() == tmp_path / "include" and cutlass.missing() is None
