"""silu_mul in Triton-lang: one program per token and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import INTERPRETING

BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x) in fp32 with five instructions; Triton-lang's exp and division take three times as many, which
    bounds steps of few rows.  Relative error about 2^-21.
    """
    if INTERPRETING:
        y = x * tl.sigmoid(x)
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.ftz.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.ftz.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 e, e;
            mul.f32 $0, e, $1;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, x_token_stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + token * x_token_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_token_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    activated = silu(gate).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * size + columns, (activated * up).to(dtype), mask=mask)


def silu_mul(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """See ops.silu_mul."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    y = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device) if out is None else out
    if y.numel():
        _silu_mul_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
            x, y, x.stride(0), size, BLOCK=BLOCK, num_warps=4, **dependent_launch(x.device)
        )
    return y
