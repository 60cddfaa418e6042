"""Products of 4-bit and int8 weights: right against fp64 of the dequantised operands; wrong operands are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper import needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.gemm import int8_layout
from slipstream_kernels.gemm.choose import variant_of
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product
from slipstream_kernels.gemm.triton.int4_dequantise import int4_dequantise
from slipstream_kernels.gemm.triton.int8_dequantise import int8_dequantise
from slipstream_kernels.ops import Int4Weight, Int8Rows
from tolerances import INT_MM

# tokens, out, in, group size; group 0 is one per row
SHAPES = [(1, 16, 64, 32), (5, 72, 256, 128), (3, 40, 192, 64), (17, 24, 96, 0), (70, 24, 320, 0)]
BACKENDS = ["reference", "triton"]


def int4(out_features: int, in_features: int, group_size: int, has_zeros: bool, device) -> Int4Weight:
    groups = (out_features, in_features // (group_size or in_features))
    packed = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    scales = (0.5 + torch.rand(groups, device=device)) * in_features**-0.5 / 4
    zeros = torch.randint(17, groups, dtype=torch.uint8, device=device) if has_zeros else None
    return ops.int4_weight(packed, scales, zeros, group_size, in_features)


def dequantised(weight: Int4Weight) -> torch.Tensor:
    """By the contract's words, one code after another, in fp64."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=torch.float64)
    for column in range(weight.in_features):
        codes = (weight.packed[:, column // 2].cpu().int() >> (4 * (column % 2))) & 15
        group = column // weight.group_size
        zeros = 8 if weight.zeros is None else weight.zeros[:, group].cpu().int()
        out[:, column] = (codes - zeros).double() * weight.scales[:, group].cpu().double()
    return out


def rows_of(kind: str, num_tokens: int, in_features: int, dtype: torch.dtype, device):
    """(operand, what it stands for in fp64)"""
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    if kind == "fp8":
        rows = ops.quantize_fp8(x)
        return rows, rows.values.double() * rows.scales.double()
    if kind == "int8":
        rows = ops.quantize_int8(x)
        return rows, rows.values.double() * rows.scales.double()[:, None]
    return x, x.double()


def check(y: torch.Tensor, exact_x: torch.Tensor, exact_w: torch.Tensor, bias, dtype, device) -> None:
    expected, spread = exact_x @ exact_w.t(), (exact_x.square() @ exact_w.square().t()).sqrt()
    expected = expected if bias is None else expected + bias.double()
    rtol, atol = INT_MM[torch.device(device).type, dtype]
    assert y.dtype == dtype
    assert ((y.double() - expected).abs() <= rtol * expected.abs() + atol * spread).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float", "fp8"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int4(device, backend, kind, has_zeros, shape, dtype) -> None:
    num_tokens, out_features, in_features, group_size = shape
    weight = int4(out_features, in_features, group_size, has_zeros, device)
    x, exact = rows_of(kind, num_tokens, in_features, dtype, device)
    bias = torch.randn(out_features, device=device).to(dtype) if has_zeros else None
    y = ops.int4_mm(x, weight, bias, backend=backend)
    check(y, exact, dequantised(weight).to(device), bias, dtype, device)
    repacked = ops.repack_int4(weight)
    assert repacked.packed.nbytes == weight.packed.nbytes
    check(ops.int4_mm(x, repacked, bias), exact, dequantised(weight).to(device), bias, dtype, device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 72, 1160, 0)])  # the last: sums split among programs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8(device, backend, kind, shape, dtype) -> None:
    num_tokens, out_features, in_features, _ = shape
    values = torch.randint(-127, 128, (out_features, in_features), device=device).to(torch.int8)
    scales = (0.5 + torch.rand(out_features, device=device)) * in_features**-0.5 / 64
    x, exact = rows_of(kind, num_tokens, in_features, dtype, device)
    bias = torch.randn(out_features, device=device).to(dtype) if kind == "int8" else None
    y = ops.int8_mm(x, values, scales, bias, backend=backend)
    check(y, exact, values.double() * scales.double()[:, None], bias, dtype, device)


def test_int8_sums_are_exact(device) -> None:
    x = Int8Rows(
        *(torch.full((2, 40000), 127, device=device).to(torch.int8), torch.ones(2, device=device)), torch.float32
    )
    values = torch.full((8, 40000), -127, dtype=torch.int8, device=device)
    values[:, 0] = 1
    assert (ops.int8_mm(x, values, torch.ones(8, device=device)) == 127 - 39999 * 127 * 127).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_static", [False, True])
def test_quantize_int8(device, backend, is_static) -> None:
    x = torch.randn(9, 200, device=device).to(torch.bfloat16)
    x[3] = 0
    scale = torch.tensor(0.01, device=device) if is_static else None
    rows = ops.quantize_int8(x, scale, backend=backend)
    expected = ops.quantize_int8(x, scale, backend="reference")
    assert torch.equal(rows.values, expected.values) and torch.equal(rows.scales, expected.scales)
    wide, limit = x.float(), 1.27 if is_static else torch.inf
    error = (rows.values.float() * rows.scales[:, None] - wide.clamp(-limit, limit)).abs()
    assert (error <= 0.501 * rows.scales[:, None]).all()
    assert rows.values.abs().max() == 127 and rows.dtype == x.dtype


def test_a_gated_int4_product_is_two_ops_in_one(device) -> None:
    weight = ops.quantize_int4(torch.randn(64, 128, device=device), 64)
    x = torch.randn(3, 128, device=device)
    assert torch.equal(ops.int4_mm(x, weight, gated=True), ops.silu_mul(ops.int4_mm(x, weight)))
    with pytest.raises(ValueError, match="weight: 3 output features"):
        ops.int4_mm(x, ops.quantize_int4(torch.randn(3, 128, device=device), 64), gated=True)
    assert device.type != "cpu" or ops.activation_sum_columns(weight) == 0


def test_a_gated_int8_product_is_two_ops_in_one(device) -> None:
    weight, x = ops.quantize_int8_weight(torch.randn(64, 128, device=device)), torch.randn(3, 128, device=device)
    for rows in (x, ops.quantize_int8(x)):
        y = ops.int8_mm(rows, weight.values, weight.scales, gated=True)
        assert torch.equal(y, ops.silu_mul(ops.int8_mm(rows, weight.values, weight.scales)))
    with pytest.raises(ValueError, match="values: 63 rows, gated"):
        ops.int8_mm(x, weight.values[:63], weight.scales[:63], gated=True)


@needs_hopper
@pytest.mark.parametrize("gated", [False, True])
def test_few_16_bit_rows_beside_int8_weights_are_streamed(gated) -> None:
    weight = ops.quantize_int8_weight(torch.randn(512, 1024, device="cuda"))
    bias = torch.randn(512, device="cuda").bfloat16()
    kind = ops.int8_weight(weight.values, weight.scales).kind
    assert variant_of(Product(kind, 8, PLAIN_ROWS, torch.bfloat16, gated)).kernel == "skinny_gemm"
    for num_tokens in (1, 8, 16, 17):
        x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
        y = ops.int8_mm(x, weight.values, weight.scales, bias, gated=gated).double()
        expected = x.double() @ (weight.values.double() * weight.scales.double()[:, None]).t() + bias.double()
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        assert y.shape == expected.shape and (y - expected).norm() / expected.norm() < 5e-3


@needs_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(4096, 1024), (512, 4096), (16, 128), (48, 14336), (36864, 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_repacked_int8_weights_beside_any_number_of_rows(dtype, out_features, in_features, gated) -> None:
    weight = ops.quantize_int8_weight(torch.randn(out_features, in_features, device="cuda") * in_features**-0.5)
    words, bias = ops.repack_int8(weight.values), torch.randn(out_features, device="cuda").to(dtype)
    assert words.dtype == torch.int32 and words.nbytes == weight.values.nbytes
    plain = weight.values.double() * weight.scales.double()[:, None]
    for num_tokens in (1, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 200, 256, 257):
        x = torch.randn(num_tokens, in_features + 8, device="cuda").to(dtype)[:, :in_features]
        y = ops.int8_mm(x, words, weight.scales, bias, gated=gated).double()
        expected = x.double() @ plain.t() + bias.double()
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        assert y.shape == expected.shape and (y - expected).norm() / expected.norm() < 6e-3, num_tokens
    x = torch.randn(3, in_features, device="cuda")
    y = ops.int8_mm(x, words, weight.scales)
    assert y.dtype == torch.float32 and (y - x @ plain.float().t()).norm() / y.norm() < 1e-3


@needs_hopper
def test_int8_weights_without_an_order_of_their_own_stay_as_they_are() -> None:
    values = torch.zeros(16, 192, dtype=torch.int8, device="cuda")
    assert ops.repack_int8(values) is values and ops.repack_int8(values.cpu()).dtype == torch.int8


def test_repacked_int8_weights_take_float_rows() -> None:
    words, x = torch.zeros(16, 32, dtype=torch.int32), torch.zeros(2, 128)
    with pytest.raises(ValueError, match="values: a weight of repack_int8 takes float rows"):
        ops.int8_mm(ops.quantize_int8(x), words, torch.ones(16))
    with pytest.raises(ValueError, match="backend"):
        ops.int8_mm(x, words, torch.ones(16), backend="reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_repacked_int8_weights_are_written_out_as_they_were(device, dtype) -> None:
    values = torch.randint(-128, 128, (5, 1168), device=device).to(torch.int8)
    words, scales = int8_layout.repack(values), 0.5 + torch.rand(5, device=device)
    assert torch.equal(int8_layout.unpack(words), values)
    assert torch.equal(int8_dequantise(words, scales, dtype), (values.float() * scales[:, None]).to(dtype))


# in, group size: units of 16 to 64 bytes, rows of several programs, groups and rows that are no powers of two
WRITTEN_OUT = [(64, 32), (256, 64), (384, 128), (96, 0), (36, 12), (10944, 32), (10944, 64), (10944, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("in_features", "group_size"), WRITTEN_OUT)
def test_canonical_int4_weights_are_written_out_as_the_reference_has_them(
    device, in_features, group_size, has_zeros, dtype
) -> None:
    weight = int4(5, in_features, group_size, has_zeros, device)
    assert torch.equal(int4_dequantise(weight, dtype), ops.dequantize_int4(weight).to(dtype))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_rows_beside_canonical_int4_weights(device, dtype, has_bias) -> None:
    """To the bit what the library makes of the reference's weights, rounded once."""
    weight, x = int4(24, 10944, 32, True, device), torch.randn(70, 10944, device=device).to(dtype)
    bias = torch.randn(24, device=device) if has_bias else None
    y = KERNELS["int4_canonical_dequantise+library"].run(x, ops.int4_linear_weight(weight, bias), (), False)
    rounded = None if bias is None else bias.to(dtype)
    assert torch.equal(y, torch.nn.functional.linear(x, ops.dequantize_int4(weight).to(dtype), rounded))
    expected = x.double() @ dequantised(weight).to(device).t()
    expected = expected if bias is None else expected + bias.double()
    assert (y.double() - expected).norm() / expected.norm() < 4e-3


def test_wrong_operands_are_named(device) -> None:
    weight, x = int4(16, 64, 32, True, device), torch.zeros(2, 64, device=device)
    cases = [
        (replace(weight, group_size=48), "group_size: 48"),
        (replace(weight, scales=weight.scales[:, :1]), "scales: shape"),
        (replace(weight, scales=weight.scales.bfloat16()), "scales: dtype"),
        (replace(weight, zeros=weight.scales), "zeros: dtype"),
    ]
    for wrong, named in cases:
        with pytest.raises(ValueError, match=named):
            ops.int4_mm(x, wrong)
    with pytest.raises(ValueError, match="x: shape"):
        ops.int4_mm(x[:, :32], weight)
    with pytest.raises(ValueError, match="values: "):
        ops.int8_mm(x, torch.zeros(4, 64, device=device), torch.ones(4, device=device))
    with pytest.raises(ValueError, match="x: dtype"):
        ops.quantize_int8(x.int())
