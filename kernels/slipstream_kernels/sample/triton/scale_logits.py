"""scale_logits in Triton-lang: one program per row and block of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents

BLOCK = 1024


@triton.jit
def tanh(x):
    """tanh in fp32, to about 2^-20 of its value; 2 sigmoid(2 x) - 1 would lose the digits of small values.

    Up to 0.625 a polynomial in x^2 (least squares, 5e-9 of the value), beyond it (1 - t) / (1 + t) of t = exp(-2 |x|).
    """
    square = x * x
    p = -0.00570404252 * square + 0.0206378615
    p = p * square - 0.0537391565
    p = p * square + 0.133314318
    p = p * square - 0.333332812
    small = x + x * (square * p)
    t = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - t) / (1.0 + t)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def _scale_logits_kernel(
    logits_ptr,
    out_ptr,
    row_stride,
    vocab_size,
    factor,
    soft_cap,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < vocab_size
    x = tl.load(logits_ptr + row * row_stride + token_ids, mask=mask, other=0.0).to(tl.float32) * factor
    if HAS_SOFT_CAP:
        x = tanh(x / soft_cap) * soft_cap
    tl.store(out_ptr + row * vocab_size + token_ids, x, mask=mask)


def scale_logits(logits: torch.Tensor, factor: float, soft_cap: float | None) -> torch.Tensor:
    """See ops.scale_logits.  The number of rows is the grid's alone, so it compiles nothing anew."""
    num_rows, vocab_size = logits.shape
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if out.numel():
        _scale_logits_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits,
            out,
            logits.stride(0),
            vocab_size,
            factor,
            1.0 if soft_cap is None else soft_cap,
            HAS_SOFT_CAP=soft_cap is not None,
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(logits.device),
        )
    return out
