"""FP8 quantisation, alone and fused with norm, silu·mul and gelu·mul: right against fp64, fused the same as apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from slipstream_kernels import ops
from slipstream_kernels.ops import Fp8Rows, Fp8Scheme

BACKENDS = ["reference", "triton"]
SIZES = [(0, 40), (0, 1100), (128, 128), (128, 640)]  # group size, columns
GATED = {"silu": (ops.silu_mul, ops.silu_mul_fp8), "gelu": (ops.gelu_mul, ops.gelu_mul_fp8)}
STEP = 2.0**-4  # half a step of e4m3 relative to the value
SUBNORMAL = 2.0**-10  # half the smallest number of e4m3


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def dequantise(rows: Fp8Rows) -> torch.Tensor:
    wide = rows.values.double().unflatten(1, (rows.scales.shape[1], -1)) * rows.scales.double()[..., None]
    return wide.flatten(1)[: rows.num_tokens]


def assert_rows_stand_for(rows: Fp8Rows, expected: torch.Tensor) -> None:
    """Each value within half a step of e4m3 at its scale (and of x's own rounding)."""
    group = expected.shape[1] // rows.scales.shape[1]
    scales = rows.scales[: rows.num_tokens].double().repeat_interleave(group, 1)
    limit = torch.maximum(expected.abs() * STEP, scales * SUBNORMAL) * 1.001 + 1e-12
    assert ((dequantise(rows) - expected.double()).abs() <= limit).all()


def assert_same(actual: Fp8Rows, expected: Fp8Rows) -> None:
    count = actual.num_tokens
    assert (count, actual.dtype) == (expected.num_tokens, expected.dtype)
    assert torch.equal(actual.values[:count].float(), expected.values[:count].float())
    assert torch.equal(actual.scales[:count], expected.scales[:count])


@pytest.mark.parametrize(("group_size", "size"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize_rows(device, backend, dtype, group_size, size) -> None:
    x = (torch.randn(6, size, device=device) * torch.logspace(-6, 3, 6, device=device)[:, None]).to(dtype)
    x[2] = 0
    x[3, 0] = 100 * x[3].abs().max()  # one outlier pushes the rest of its group towards the subnormals
    rows = ops.quantize_fp8(x, Fp8Scheme(group_size), backend=backend)
    assert rows.dtype == dtype and rows.values.dtype == torch.float8_e4m3fn
    assert rows.scales.shape == ((8, size // group_size) if group_size else (6, 1))
    assert rows.scales.stride(0) == 1 or rows.scales.shape[1] == 1
    assert_rows_stand_for(rows, x)
    amax = rows.values[:6].float().view(6, rows.scales.shape[1], -1).abs().amax(-1)
    assert (amax[[0, 1, 3, 4, 5]] == 448).all() and (amax[2] == 0).all()
    assert_same(rows, ops.quantize_fp8(x, Fp8Scheme(group_size), backend="reference"))


def test_static_scale_saturates(device, backend) -> None:
    x = torch.tensor([[1.0, -3.0, 500.0, -1e6], [0.1, 0.0, 900.0, 17.0]], device=device)
    rows = ops.quantize_fp8(x, Fp8Scheme(scale=torch.tensor(2.0, device=device)), backend=backend)
    expected = torch.tensor([[1.0, -3.0, 512.0, -896.0], [0.1015625, 0.0, 896.0, 16.0]], device=device)
    assert torch.equal(dequantise(rows).float(), expected)  # 250 is rounded to 256, 8.5 to the even 8
    assert torch.equal(rows.scales, torch.full((2, 1), 2.0, device=device))


@pytest.mark.parametrize(("group_size", "size"), SIZES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_and_quantise_is_norm_then_quantise(device, backend, dtype, has_residual, group_size, size) -> None:
    wide, other = torch.randn(2, 5, size + 3, device=device).to(dtype)
    x, residual = wide[:, :size], other[:, :size] if has_residual else None
    weight = torch.rand(size, device=device).to(dtype)
    rows, summed = ops.rms_norm_fp8(x, weight, 1e-5, residual, Fp8Scheme(group_size), backend=backend)
    assert torch.equal(summed, x if residual is None else ops.rms_norm(x, weight, 1e-5, residual, backend=backend)[1])
    normed = ops.rms_norm(summed, weight, 1e-5, backend=backend)
    # sums of squares are added in another order: a value at the edge of a step may fall to the other side
    apart = ops.quantize_fp8(normed, Fp8Scheme(group_size), backend=backend)
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(rows.scales[:5], apart.scales[:5], rtol=rtol, atol=0)
    same = (rows.values[:5].float() == apart.values[:5].float()).float().mean().item()
    assert same > 0.99
    torch.testing.assert_close(dequantise(rows), dequantise(apart), rtol=2 * STEP * 1.1, atol=SUBNORMAL)


@pytest.mark.parametrize(("group_size", "size"), [*SIZES, (0, 96)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_mul_and_quantise_is_gated_mul_then_quantise(device, backend, activation, group_size, size) -> None:
    gated_mul, fused = GATED[activation]
    x = 3 * torch.randn(7, 2 * size + 5, device=device).bfloat16()[:, : 2 * size]
    for scheme in (Fp8Scheme(group_size), Fp8Scheme(scale=torch.tensor(0.03, device=device))):
        apart = ops.quantize_fp8(gated_mul(x, backend=backend), scheme, backend=backend)
        assert_same(fused(x, scheme, backend=backend), apart)


@pytest.mark.parametrize(("num_tokens", "group_size", "size"), [(1, 0, 21504), (33, 128, 384), (7, 0, 1000)])
def test_gelu_mul_and_quantise_is_right(device, backend, num_tokens, group_size, size) -> None:
    x = 3 * torch.randn(num_tokens, 2 * size, device=device)
    gate, up = x.double().chunk(2, dim=-1)
    rows = ops.gelu_mul_fp8(x, Fp8Scheme(group_size), backend=backend)
    assert_rows_stand_for(rows, F.gelu(gate, approximate="tanh") * up)


def test_weight_blocks(device) -> None:
    weight = torch.randn(200, 256, device=device)
    weight[:128, 128:] *= 50
    values, scales = ops.quantize_fp8_blocks(weight)
    assert scales.shape == (2, 2)
    torch.testing.assert_close(scales[0, 1], weight[:128, 128:].abs().max() / 448)
    torch.testing.assert_close(scales[1, 0], weight[128:, :128].abs().max() / 448)
    back = values.double() * scales.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    limit = torch.maximum(weight.abs() * STEP, scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1) / 1024)
    assert ((back - weight).abs() <= 1.001 * limit).all()


def test_no_rows(device, backend) -> None:
    x = torch.empty(0, 256, device=device)
    assert ops.quantize_fp8(x, backend=backend).values.shape == (0, 256)
    for _, fused in GATED.values():
        assert fused(x, Fp8Scheme(128), backend=backend).scales.shape == (0, 1)
    rows, summed = ops.rms_norm_fp8(x, torch.ones(256, device=device), 1e-5, x, Fp8Scheme(128), backend=backend)
    assert rows.scales.shape == (0, 2) and summed.shape == (0, 256)


def test_refusals() -> None:
    x = torch.ones(2, 200)
    with pytest.raises(ValueError, match="group_size: 128 does not divide rows of 200"):
        ops.quantize_fp8(x, Fp8Scheme(128))
    with pytest.raises(ValueError, match="group_size: 64"):
        ops.quantize_fp8(x, Fp8Scheme(64))
    with pytest.raises(ValueError, match="static scale is one number"):
        ops.silu_mul_fp8(x, Fp8Scheme(scale=torch.ones(2)))


@pytest.mark.parametrize(
    ("num_rows", "size", "columns"), [(257, 256, 128), (200, 256, 128), (128, 384, 128), (3, 1152, 64)]
)
def test_few_rows_get_sums_of_their_values(device, backend, num_rows: int, size: int, columns: int) -> None:
    if num_rows > 100 and backend == "triton" and str(device) == "cpu":
        pytest.skip("Triton's interpreter takes 30 ms a row")
    x = torch.randn(num_rows, 2 * size, device=device).bfloat16()
    scheme, weight = Fp8Scheme(sum_columns=columns), torch.ones(size, device=device).bfloat16()
    some = x[:, :size]
    for rows in (
        ops.quantize_fp8(some, scheme, backend=backend),
        ops.silu_mul_fp8(x, scheme, backend=backend),
        ops.gelu_mul_fp8(x, scheme, backend=backend),
        ops.rms_norm_fp8(some, weight, 1e-5, some, scheme, backend=backend)[0],
    ):
        if num_rows > 256:
            assert rows.activation_sums is None
            continue
        assert rows.activation_sums is not None
        sums = rows.values.float().unflatten(1, (-1, columns)).sum(2)
        ours = rows.activation_sums.transpose(1, 2).flatten(0, 1)  # by row, with those of whole tiles
        assert ours.shape[0] % 128 == 0
        torch.testing.assert_close(ours[:num_rows], sums, rtol=1e-5, atol=1e-3)


def test_more_rows_than_are_summed_have_no_sums(device, backend) -> None:
    scheme = Fp8Scheme(sum_columns=128, summed_rows=2)
    for num_rows in (2, 3):
        rows = ops.quantize_fp8(torch.randn(num_rows, 256, device=device).bfloat16(), scheme, backend=backend)
        assert (rows.activation_sums is None) == (num_rows == 3)


def test_sums_of_runs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="sum_columns: 128 does not divide rows of 192"):
        ops.quantize_fp8(torch.zeros(2, 192), Fp8Scheme(sum_columns=128))
    with pytest.raises(ValueError, match="sum_columns: 32, expected 0, 64 or 128"):
        ops.quantize_fp8(torch.zeros(2, 192), Fp8Scheme(sum_columns=32))
    with pytest.raises(ValueError, match="summed_rows: 257, expected 0 to 256"):
        ops.quantize_fp8(torch.zeros(2, 256), Fp8Scheme(sum_columns=128, summed_rows=257))
