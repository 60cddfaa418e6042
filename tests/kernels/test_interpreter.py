"""The interpreter's silent bf16 fault is worked around: this fails if `dot` stops upcasting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from slipstream_kernels.triton.interpreter import dot


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
