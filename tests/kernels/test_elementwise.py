"""rms_norm, silu_mul: right against fp64, and triton the same as the reference, over odd sizes."""

from __future__ import annotations

import pytest
import torch
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


def test_no_tokens(device, backend) -> None:
    x = torch.empty(0, 16, device=device)
    assert ops.silu_mul(x, backend=backend).shape == (0, 8)
    assert ops.rms_norm(x, torch.ones(16, device=device), 1e-5, backend=backend).shape == (0, 16)
