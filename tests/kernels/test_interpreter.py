"""The interpreter's faults of bf16 are worked around: silent ones of `dot`, casts that truncate."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from slipstream_kernels.triton.interpreter import dot, round_to


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, out_ptr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    index = rows * 16 + columns
    tl.store(out_ptr + index, dot(tl.load(a_ptr + index), tl.load(b_ptr + index)))


def test_bf16_dot_is_right(device: torch.device) -> None:
    a, b = torch.randn(2, 16, 16, device=device).bfloat16()
    out = torch.empty(16, 16, device=device)
    _matmul_kernel[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-3, atol=1e-3)


@triton.jit
def _round_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, round_to(tl.load(x_ptr + index), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_numbers_are_the_nearest(device: torch.device, dtype: torch.dtype) -> None:
    """Ties go to the even one, of either sign; a carry goes into the exponent."""
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1.9999, 0.0, 3e-7, 60000.0])
    x = torch.cat((ties, -ties, torch.randn(240))).to(device)
    out = torch.empty(256, dtype=dtype, device=device)
    _round_kernel[(1,)](x, out, SIZE=256)
    assert torch.equal(out, x.to(dtype))
