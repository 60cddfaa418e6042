"""Products on a CPU: chosen there, exact digits and bits, and a row's result does not depend on the others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm.choose import choose, this_device
from slipstream_kernels.gemm.cpu.int8_mm import ROWS_AT_ONCE, saturates, split_digits
from slipstream_kernels.gemm.cpu.scaled_mm import MOVED, move_bits
from slipstream_kernels.gemm.linear_weight import fp8_weight, int4_linear_weight, int8_weight
from slipstream_kernels.gemm.product import Product
from tolerances import INT4_PACKED_ON_CPU

CPU = torch.device("cpu")


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(300, 256, generator=torch.Generator().manual_seed(1)) * 0.05


@pytest.mark.parametrize("num_digits", [2, 3])
def test_digits_are_the_rows(num_digits: int) -> None:
    x = torch.randn(7, 33) * torch.logspace(-6, 6, 7)[:, None]
    digits, scales = split_digits(x, num_digits)
    assert digits.shape == (num_digits, 7, 33) and digits.dtype == torch.int8
    places = (256.0 ** torch.arange(num_digits, dtype=torch.float64))[:, None, None]
    error = ((digits.double() * places).sum(0) * scales - x).abs() / scales
    assert error.max() <= 0.51 if num_digits == 2 else error.max() <= 1.0  # fp32 has 24 bits, as three digits have


def test_digits_of_zeros_and_of_no_numbers() -> None:
    x = torch.zeros(3, 8)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    digits, scales = split_digits(x, 3)
    assert not digits[:, 0].any() and scales[0] > 0
    q = ops.quantize_int8_weight(torch.randn(4, 8))
    y = ops.int8_mm(x, q.values, q.scales)
    assert (y[0] == 0).all() and y[1].isnan().all() and not y[2].isfinite().any()


def test_moved_bits_are_every_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(E4M3)
    is_number = (codes & 127) != 127
    assert torch.equal((move_bits(values) * MOVED)[is_number], values.float()[is_number])


def test_weights_that_are_nan_stay_nan(weight: torch.Tensor) -> None:
    rows = ops.quantize_fp8(torch.randn(2, 256))
    plain = ops.quantize_fp8(weight)
    plain.values.view(torch.uint8)[5, 7] = 127
    y = ops.linear(rows, fp8_weight(plain.values, plain.scales.view(-1)))
    assert y[:, 5].isnan().all() and y.isnan().sum() == 2
    values, scales = ops.quantize_fp8_blocks(weight)
    values.view(torch.uint8)[130, 200] = 255
    by_block = ops.quantize_fp8(torch.randn(2, 256), ops.Fp8Scheme(128))
    held = ops.block_scales(300, 256, CPU)
    held[:, :2] = scales
    y = ops.linear(by_block, fp8_weight(values, held))
    assert y[:, 128:256].isnan().all() and not y[:, :128].isnan().any()


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_4_bits_packed_for_bf16_rows(weight: torch.Tensor, group_size: int, has_zeros: bool) -> None:
    canonical = ops.quantize_int4(weight[:288], group_size, has_zeros=has_zeros)
    packed = ops.repack_int4(canonical, dtype=torch.bfloat16)
    if not packed.is_repacked:
        pytest.skip("this CPU has neither AVX2 nor AVX512")
    assert packed.packed.nbytes == canonical.packed.nbytes
    assert ops.repack_int4(canonical, dtype=torch.float32) is canonical
    assert ops.repack_int4(ops.quantize_int4(weight, group_size), dtype=torch.bfloat16).packed.dtype == torch.uint8
    x, bias = torch.randn(70, 256).bfloat16(), torch.randn(288)
    y = ops.linear(x, int4_linear_weight(packed, bias))
    expected = ops.int4_mm(x.float(), canonical, bias, backend="reference")
    size = (x.double().square() @ ops.dequantize_int4(canonical).double().square().t()).sqrt()
    rtol, atol = INT4_PACKED_ON_CPU
    assert ((y.double() - expected).abs() <= rtol * expected.abs() + atol * size).all()
    assert torch.equal(ops.linear(x[40:41], int4_linear_weight(packed, bias))[0], y[40])


LARGE_PRODUCTS = """
import torch
from slipstream_kernels import ops
from slipstream_kernels.gemm.linear_weight import int8_weight
values = torch.full((32, 64), 127, dtype=torch.int8)
values[::2, ::3] = -127
x = values[:5].float()
for int8_rows in (False, True):
    weight = int8_weight(values, torch.ones(32), int8_rows=int8_rows)
    y = ops.linear(weight.input_quant.cast(x), weight)
    torch.testing.assert_close(y.double(), x.double() @ values.double().t(), rtol=1e-5, atol=1e-3)
"""


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", "DEFAULT"])
def test_integer_products_are_exact_or_not_taken(instructions: str) -> None:
    """oneDNN's saturate on CPUs without VNNI, which its variable makes of any."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", LARGE_PRODUCTS], env=environment, check=True, timeout=300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["wint8", "w8a8_int8", "fp8", "wint4"])
def test_a_row_by_itself(weight: torch.Tensor, method: str, dtype: torch.dtype) -> None:
    """The CPU's own products are chosen, and rows of many are what they are alone, up to the order of fp32 sums."""
    if method == "wint4":
        held = int4_linear_weight(ops.quantize_int4(weight, 64))
    elif method == "fp8":
        quantised = ops.quantize_fp8(weight)
        held = fp8_weight(quantised.values, quantised.scales.view(-1))
    else:
        rows = ops.quantize_int8_weight(weight)
        held = int8_weight(rows.values, rows.scales, int8_rows=method == "w8a8_int8")
    product = Product(held.kind, 4, held.kind.rows, dtype, gated=False)
    is_own = "int8" not in method or not saturates()
    assert choose(product, this_device(CPU)).kernel == ("cpu" if is_own else "reference")
    x = torch.randn(ROWS_AT_ONCE + 3, 256).to(dtype)
    together = ops.linear(held.input_quant.cast(x), held)
    for row in (0, 100, ROWS_AT_ONCE + 2):
        alone = ops.linear(held.input_quant.cast(x[row : row + 1]), held)
        if "int8" in method and is_own:
            assert torch.equal(alone[0], together[row])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
