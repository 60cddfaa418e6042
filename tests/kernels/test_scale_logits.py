"""scale_logits: right against fp64, digit for digit in fp32, over odd vocabularies and strided rows."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops

BACKENDS = ["reference", "triton"]
ROUNDINGS = 2.0**-19  # in fp32: the factor, a division, tanh, the cap; a GPU has approximate ones of the middle two


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def expected(logits: torch.Tensor, factor: float, soft_cap: float | None) -> torch.Tensor:
    wide = logits.double() * factor
    return wide if soft_cap is None else torch.tanh(wide / soft_cap) * soft_cap


def assert_exact(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == torch.float32 and actual.is_contiguous()
    torch.testing.assert_close(actual.double(), wanted, rtol=ROUNDINGS, atol=0)


@pytest.mark.parametrize(("factor", "soft_cap"), [(1.0, 30.0), (0.125, None), (0.0625, 30.0), (1.0, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_digit(device, backend, dtype, factor, soft_cap) -> None:
    """Logits of every size, small ones above all: their tanh must not be a difference of numbers near one."""
    sizes = torch.logspace(-6, 3, 33, device=device)
    logits = (torch.randn(33, 97, device=device) * sizes[:, None]).to(dtype)
    assert_exact(ops.scale_logits(logits, factor, soft_cap, backend=backend), expected(logits, factor, soft_cap))


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 49155), (1, 256000), (7, 1)])
def test_vocabularies(device, backend, num_rows, vocab_size) -> None:
    logits = 20 * torch.randn(num_rows, vocab_size, device=device).bfloat16()
    assert_exact(ops.scale_logits(logits, 1.0, 30.0, backend=backend), expected(logits, 1.0, 30.0))


def test_strided_rows_stay_as_they_are(device, backend) -> None:
    """The logits of fp32 are not written over."""
    wide = 20 * torch.randn(4, 1100, device=device)
    kept = wide.clone()
    assert_exact(ops.scale_logits(wide[:, :1030], 2.0, 5.0, backend=backend), expected(kept[:, :1030], 2.0, 5.0))
    assert torch.equal(wide, kept)


def test_a_cap_keeps_the_order_and_the_ends(device, backend) -> None:
    logits = torch.linspace(-100, 100, 2001, device=device)[None]
    assert (ops.scale_logits(logits, 1.0, 30.0, backend=backend)[0].diff() > 0).all()
    ends = torch.tensor([[float("-inf"), float("inf"), float("nan"), -0.0]], device=device)
    low, high, nothing, zero = ops.scale_logits(ends, 1.0, 30.0, backend=backend)[0].tolist()
    assert (low, high, zero) == (-30.0, 30.0, 0.0) and nothing != nothing


def test_no_rows_and_refusals(device, backend) -> None:
    assert ops.scale_logits(torch.empty(0, 9, device=device), 2.0, backend=backend).shape == (0, 9)
    x = torch.ones(2, 8, device=device)
    cases = [
        (x[0], None, r"logits: shape \(8,\)"),
        (x.int(), None, "logits: dtype torch.int32"),
        (x.t(), None, "logits: last dimension must be contiguous"),
        (x, 0.0, "soft_cap: 0.0 is not above 0"),
    ]
    for logits, soft_cap, message in cases:
        with pytest.raises(ValueError, match=message):
            ops.scale_logits(logits, 1.0, soft_cap, backend=backend)
