"""rms_norm in Triton-lang: one program per row, the residual sum and the norm in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    summed_ptr,
    x_token_stride,
    x_head_stride,
    residual_token_stride,
    residual_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    columns = tl.arange(0, SIZE_PADDED)
    mask = columns < SIZE
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_previous(DEPENDENT)
    x = tl.load(x_ptr + token * x_token_stride + head * x_head_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + token * residual_token_stride + head * residual_head_stride
        rounded = (x + tl.load(residual_row + columns, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(summed_ptr + row * SIZE + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    y = scaled.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * SIZE + columns, y.to(dtype), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See ops.rms_norm."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    summed = y if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = x if residual is None else residual
    size, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    size_padded = triton.next_power_of_2(size)
    if x.numel():
        _rms_norm_kernel[(x.shape[0] * num_heads,)](
            x,
            added,
            weight,
            y,
            summed,
            x.stride(0),
            x.stride(1),
            added.stride(0),
            added.stride(1),
            eps,
            NUM_HEADS=num_heads,
            SIZE=size,
            SIZE_PADDED=size_padded,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(max(size_padded // 512, 1), 16),
            **dependent_launch(x.device),
        )
    return y if residual is None else (y, summed)
