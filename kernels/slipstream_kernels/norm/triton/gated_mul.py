"""gated_mul in Triton-lang: one program per token and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import INTERPRETING

BLOCK = 1024


@triton.jit
def _times_sigmoid(x, z):
    """x * sigmoid(z) in fp32 with five instructions; Triton-lang's exp and division take three times as many, which
    bounds steps of few rows.  Relative error about 2^-21.
    """
    if INTERPRETING:
        y = x * tl.sigmoid(z)
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.ftz.f32 e, $2, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.ftz.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 e, e;
            mul.f32 $0, e, $1;
            }""",
            "=f,f,f",
            [x, z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def silu(x):
    """x * sigmoid(x) in fp32."""
    return _times_sigmoid(x, x)


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(u)) in fp32 as x * sigmoid(2 u), which loses no digits where tanh is near -1.

    u: sqrt(2 / pi) * (x + 0.044715 * x^3); its factors times two are the numbers below.
    """
    return _times_sigmoid(x, x * (1.5957691216057308 + 0.07135481627260025 * x * x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of that name, in fp32."""
    if ACTIVATION == "silu":
        y = silu(x)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y = gelu_tanh(x)
    return y


@triton.jit
def _gated_mul_kernel(
    x_ptr, out_ptr, x_token_stride, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + token * x_token_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_token_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    activated = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * size + columns, (activated * up).to(dtype), mask=mask)


def gated_mul(x: torch.Tensor, activation: str, out: torch.Tensor | None) -> torch.Tensor:
    """See ops.gated_mul."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    y = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device) if out is None else out
    if y.numel():
        grid = num_tokens, triton.cdiv(size, BLOCK)
        constants = {"ACTIVATION": activation, "BLOCK": BLOCK}
        _gated_mul_kernel[grid](x, y, x.stride(0), size, **constants, num_warps=4, **dependent_launch(x.device))
    return y
