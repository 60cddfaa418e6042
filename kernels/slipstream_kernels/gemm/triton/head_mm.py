"""head_mm in Triton-lang, for few tokens: a program's weights are loaded while the kernel before still runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import dot
from slipstream_kernels.triton.step_kernel import step_kernel

LEAST_FEATURES, MOST_WEIGHTS = 16, 16384  # of a program: output features, weights that its registers hold


class Tiles(NamedTuple):
    """padded: input features; block_m: tokens, block_n: output features of a program.  blocks: of output features."""

    padded: int
    block_m: int
    block_n: int
    blocks: int
    num_programs: int


@triton.jit
def load_tile(
    weight_ptr, head_stride, feature_stride, column_stride, head, block, out_features, in_features,
    PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[PADDED, BLOCK_N] weights of a head, zeros where there are none."""
    features, columns = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PADDED)
    places = head.to(tl.int64) * head_stride + features[None, :] * feature_stride + columns[:, None] * column_stride
    mask = (features < out_features)[None, :] & (columns < in_features)[:, None]
    return tl.load(weight_ptr + places, mask=mask, other=0.0)


@triton.jit
def multiply_tile(
    x_ptr, weight, out_ptr, x_token_stride, x_head_stride, out_token_stride, out_head_stride, head, block, first_token,
    num_tokens, out_features, in_features, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """weight: of load_tile."""
    features, columns = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PADDED)
    tokens = first_token + tl.arange(0, BLOCK_M)
    is_token, rows, head = (tokens < num_tokens)[:, None], tokens.to(tl.int64)[:, None], head.to(tl.int64)
    places = head * x_head_stride + rows * x_token_stride + columns[None, :]
    x = tl.load(x_ptr + places, mask=is_token & (columns < in_features)[None, :], other=0.0)
    y = dot(x, weight).to(out_ptr.dtype.element_ty)
    places = head * out_head_stride + rows * out_token_stride + features[None, :]
    tl.store(out_ptr + places, y, mask=is_token & (features < out_features)[None, :])


@step_kernel
def _head_mm_kernel(
    x_ptr, weight_ptr, out_ptr, x_token_stride, x_head_stride, weight_head_stride, weight_feature_stride,
    weight_column_stride, out_token_stride, out_head_stride, num_tokens, num_heads, out_features, in_features,
    PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of features of all heads, for one tile of tokens after the other."""
    start_dependents(DEPENDENT)
    place, num_blocks = tl.program_id(0), tl.cdiv(out_features, BLOCK_N)
    block, head, tile = place % num_blocks, place // num_blocks % num_heads, place // (num_blocks * num_heads)
    weight = load_tile(weight_ptr, weight_head_stride, weight_feature_stride, weight_column_stride, head, block,
                       out_features, in_features, PADDED, BLOCK_N)  # fmt: skip
    await_previous(DEPENDENT)
    multiply_tile(x_ptr, weight, out_ptr, x_token_stride, x_head_stride, out_token_stride, out_head_stride, head, block,
                  tile * BLOCK_M, num_tokens, out_features, in_features, PADDED, BLOCK_M, BLOCK_N)  # fmt: skip


def head_mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ops.head_mm."""
    num_tokens, (num_heads, out_features, in_features) = x.shape[0], weight.shape
    if not num_tokens:
        return
    tiles = tiles_of(num_tokens, weight)
    _head_mm_kernel[(tiles.num_programs,)](
        x, weight, out, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1), num_tokens, num_heads,
        out_features, in_features, PADDED=tiles.padded, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=4,
        **dependent_launch(x.device),
    )  # fmt: skip


def tiles_of(num_tokens: int, weight: torch.Tensor) -> Tiles:
    """Output features of a program: as many as give each SM one program, within what registers hold."""
    num_heads, out_features, in_features = weight.shape
    padded = max(triton.next_power_of_2(in_features), 16)
    per_head = max(count_sms(weight.device) // num_heads, 1)
    wanted = triton.next_power_of_2(triton.cdiv(out_features, per_head))
    block_n = max(min(wanted, MOST_WEIGHTS // padded), LEAST_FEATURES)
    block_m = min(max(triton.next_power_of_2(num_tokens), 16), 64)
    blocks = triton.cdiv(out_features, block_n)
    return Tiles(padded, block_m, block_n, blocks, blocks * num_heads * triton.cdiv(num_tokens, block_m))
