"""rms_norm, silu_mul, gelu_mul: right against fp64, and triton the same as the reference, over odd sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from slipstream_kernels import ops
from tolerances import ELEMENTWISE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["reference", "triton"]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = ELEMENTWISE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double().to(actual.device), rtol=rtol, atol=atol)


@pytest.mark.parametrize("size", [8, 40, 384, 1100])
def test_rms_norm(device, dtype, backend, size) -> None:
    x, weight = torch.randn(5, size, device=device).to(dtype), torch.rand(size, device=device).to(dtype)
    y = ops.rms_norm(x, weight, 1e-5, backend=backend)
    wide = x.double()
    assert_near(y, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    out = torch.empty_like(x)
    assert ops.rms_norm(x, weight, 1e-5, out=out, backend=backend) is out
    assert torch.equal(out, y)


def test_rms_norm_of_heads_of_a_view(device, dtype, backend) -> None:
    qkv = torch.randn(5, 4, 80, device=device).to(dtype)
    weight = torch.rand(80, device=device).to(dtype)
    heads = qkv[:, 1:3]
    expected = ops.rms_norm(heads.contiguous().view(10, 80), weight, 1e-6, backend="reference").view(5, 2, 80)
    assert_near(ops.rms_norm(heads, weight, 1e-6, backend=backend), expected)


def test_rms_norm_adds_the_residual_first(device, dtype, backend) -> None:
    x, residual = torch.randn(2, 7, 96, device=device).to(dtype)
    weight = torch.rand(96, device=device).to(dtype)
    y, summed = ops.rms_norm(x, weight, 1e-5, residual, backend=backend)
    assert_near(summed, x.double() + residual.double())
    assert_near(y, ops.rms_norm(summed, weight, 1e-5, backend="reference"))


@pytest.mark.parametrize("size", [1, 45, 1030])
def test_silu_mul(device, dtype, backend, size) -> None:
    x = 3 * torch.randn(3, 2 * size, device=device).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(ops.silu_mul(x, backend=backend), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize(("num_tokens", "size"), [(3, 1), (33, 96), (7, 1000), (1, 21504)])
def test_gelu_mul(device, dtype, backend, num_tokens, size) -> None:
    """Rows with something between them, against torch in fp64; erf's gelu is 5e-4 away."""
    x = (3 * torch.randn(num_tokens, 2 * size + 5, device=device).to(dtype))[:, : 2 * size]
    x[:, size:].clamp_(-1, 1)  # torch in fp32 is up to 4e-7 away where the activation is near zero
    gate, up = x.double().chunk(2, dim=-1)
    y = ops.gelu_mul(x, backend=backend)
    assert_near(y, F.gelu(gate, approximate="tanh") * up)
    out = torch.empty_like(y)
    assert ops.gelu_mul(x, out=out, backend=backend) is out
    assert torch.equal(out, y)


def test_gelu_mul_of_extreme_gates(device, dtype, backend) -> None:
    """x^3 of the largest is infinite in fp32; far below zero the activation is zero."""
    most = torch.finfo(dtype).max
    gate = torch.tensor([most, 40.0, 1e-3, 0.0, -1e-3, -40.0, -most], device=device).to(dtype)
    y = ops.gelu_mul(torch.stack([gate, torch.ones_like(gate)]).t().contiguous(), backend=backend).flatten()
    assert_near(y, F.gelu(gate.double(), approximate="tanh"))
    assert y[0] == gate[0] and not y[-2:].any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("gated_mul", [ops.silu_mul, ops.gelu_mul])
def test_wrong_rows_are_named(device, backend, gated_mul) -> None:
    x = torch.ones(2, 8, device=device)
    cases = [
        (x[0], None, r"x: shape \(8,\), expected \[num_tokens, 2 \* size\]"),
        (x[:, :7], None, r"x: shape \(2, 7\)"),
        (x.int(), None, "x: dtype torch.int32"),
        (x.t(), None, "x: last dimension must be contiguous"),
        (x, torch.ones(2, 8, device=device), r"out: shape \(2, 8\), expected \(2, 4\)"),
        (x, torch.ones(2, 4, device=device).half(), "out: must be contiguous and torch.float32"),
    ]
    for rows, out, message in cases:
        with pytest.raises(ValueError, match=message):
            gated_mul(rows, out=out, backend=backend)
    with pytest.raises(ValueError, match="activation: 'relu' is not one of silu, gelu_tanh"):
        ops.gated_mul(x, "relu", backend=backend)


def test_no_tokens(device, backend) -> None:
    x = torch.empty(0, 16, device=device)
    assert ops.silu_mul(x, backend=backend).shape == ops.gelu_mul(x, backend=backend).shape == (0, 8)
    assert ops.rms_norm(x, torch.ones(16, device=device), 1e-5, backend=backend).shape == (0, 16)
