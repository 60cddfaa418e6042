"""write_kv, rms_norm, rope, silu_mul: right against fp64, and triton the same as the reference, over odd sizes."""

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


@pytest.mark.parametrize(("num_heads", "head_dim", "block_size"), [(1, 64, 16), (3, 80, 4), (2, 24, 64)])
def test_write_kv_writes_its_slots_and_nothing_else(device, dtype, backend, num_heads, head_dim, block_size) -> None:
    qkv = torch.randn(5, 3 * num_heads, head_dim, device=device).to(dtype)
    k, v = qkv[:, num_heads : 2 * num_heads], qkv[:, 2 * num_heads :]
    key_cache = torch.full((3, num_heads, block_size, head_dim), 7.0, dtype=dtype, device=device)
    value_cache = key_cache.clone()
    slots = [3, -1, 3 * block_size - 1, block_size + 1, 0]
    ops.write_kv(k, v, key_cache, value_cache, torch.tensor(slots, device=device), backend=backend)
    for cache, source in ((key_cache, k), (value_cache, v)):
        expected = torch.full_like(cache, 7.0)
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // block_size, :, slot % block_size] = source[token]
        assert torch.equal(cache, expected)


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


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 20), (24, 24)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs_as_complex_numbers(device, dtype, backend, head_dim, rotary_dim, interleaved) -> None:
    qkv = torch.randn(4, 6, head_dim, device=device).to(dtype)
    before = qkv.double()
    q, k = qkv[:, :3], qkv[:, 3:5]
    positions = torch.tensor([0, 30, 7, 1], device=device)
    angles = torch.outer(torch.arange(31.0), 10000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    ops.rope(q, k, positions, cache, rotary_dim=rotary_dim, interleaved=interleaved, backend=backend)

    half = rotary_dim // 2
    rotated = before[:, :5, :rotary_dim]
    pairs = rotated.unflatten(-1, (half, 2)) if interleaved else rotated.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones((), dtype=torch.float64, device=device), angles.double().to(device)[positions][:, None]
    )
    turned = torch.view_as_real(turned)
    expected = before.clone()
    expected[:, :5, :rotary_dim] = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    assert_near(qkv, expected)
    assert torch.equal(qkv[:, 5].double(), before[:, 5])
    assert torch.equal(qkv[..., rotary_dim:].double(), before[..., rotary_dim:])


@pytest.mark.parametrize("size", [1, 45, 1030])
def test_silu_mul(device, dtype, backend, size) -> None:
    x = 3 * torch.randn(3, 2 * size, device=device).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(ops.silu_mul(x, backend=backend), gate / (1 + torch.exp(-gate)) * up)


def test_no_tokens(device, backend) -> None:
    x = torch.empty(0, 16, device=device)
    assert ops.silu_mul(x, backend=backend).shape == (0, 8)
    assert ops.rms_norm(x, torch.ones(16, device=device), 1e-5, backend=backend).shape == (0, 16)
