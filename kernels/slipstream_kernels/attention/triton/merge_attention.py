"""merge_attention in Triton-lang: one program per head of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _merge_attention_kernel(out_ptr, lse_ptr, other_ptr, other_lse_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    own, added = tl.load(lse_ptr + row), tl.load(other_lse_ptr + row)
    maximum = tl.maximum(own, added)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    own_weight, added_weight = tl.exp(own - shift), tl.exp(added - shift)
    total = own_weight + added_weight
    safe = tl.where(total == 0.0, 1.0, total)
    # Values of no keys are not loaded: they may be NaN.
    x = tl.load(out_ptr + row * D + dims, mask=dims < tl.where(own_weight > 0.0, D, 0), other=0.0).to(tl.float32)
    y = tl.load(other_ptr + row * D + dims, mask=dims < tl.where(added_weight > 0.0, D, 0), other=0.0).to(tl.float32)
    merged = x * (own_weight / safe) + y * (added_weight / safe)
    tl.store(out_ptr + row * D + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < D)
    tl.store(lse_ptr + row, shift + tl.log(total))


def merge_attention(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """See ops.merge_attention."""
    dim = out.shape[2]
    if lse.numel():
        _merge_attention_kernel[(lse.numel(),)](
            out, lse, other, other_lse, D=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=1
        )
