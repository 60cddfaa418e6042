"""head_mm in Triton-lang, for few tokens: a program's weights are loaded while the kernel before still runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel

LEAST_FEATURES, MOST_WEIGHTS = 16, 16384  # of a program: output features, weights that its registers hold


@step_kernel
def _head_mm_kernel(
    x_ptr, weight_ptr, out_ptr, x_token_stride, x_head_stride, weight_head_stride, weight_feature_stride,
    weight_column_stride, out_token_stride, out_head_stride, num_tokens, out_features, in_features,
    PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of features, heads, tiles of tokens)."""
    start_dependents(DEPENDENT)
    features, columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PADDED)
    head = tl.program_id(1).to(tl.int64)
    is_feature, is_column = features < out_features, columns < in_features
    weight = tl.load(
        weight_ptr + head * weight_head_stride + features[None, :] * weight_feature_stride
        + columns[:, None] * weight_column_stride, mask=is_feature[None, :] & is_column[:, None], other=0.0,
    )  # fmt: skip
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    rows = tokens.to(tl.int64)[:, None]
    await_previous(DEPENDENT)
    x = tl.load(
        x_ptr + head * x_head_stride + rows * x_token_stride + columns[None, :],
        mask=is_token[:, None] & is_column[None, :], other=0.0,
    )  # fmt: skip
    y = dot(x, weight).to(out_ptr.dtype.element_ty)
    out = out_ptr + head * out_head_stride + rows * out_token_stride + features[None, :]
    tl.store(out, y, mask=is_token[:, None] & is_feature[None, :])


def head_mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ops.head_mm."""
    num_tokens, (num_heads, out_features, in_features) = x.shape[0], weight.shape
    if not num_tokens:
        return
    padded = max(triton.next_power_of_2(in_features), 16)
    block_n = _tile_features(num_heads, out_features, padded, x.device)
    block_m = min(max(triton.next_power_of_2(num_tokens), 16), 64)
    grid = (triton.cdiv(out_features, block_n), num_heads, triton.cdiv(num_tokens, block_m))
    _head_mm_kernel[grid](
        x, weight, out, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1), num_tokens,
        out_features, in_features, PADDED=padded, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        **dependent_launch(x.device),
    )  # fmt: skip


def _tile_features(num_heads: int, out_features: int, padded: int, device: torch.device) -> int:
    """Of a program: as many as give each SM one program, within what registers hold."""
    per_head = max(count_sms(device) // num_heads, 1)
    wanted = triton.next_power_of_2(triton.cdiv(out_features, per_head))
    return max(min(wanted, MOST_WEIGHTS // padded), LEAST_FEATURES)
