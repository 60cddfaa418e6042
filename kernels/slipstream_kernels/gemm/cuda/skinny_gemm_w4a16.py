"""Products of up to 16 tokens with 4-bit weights in CUDA: chooses a variant, fills its arguments, launches it.

Hopper only.  A CTA owns whole output features.  No device value is read on the host, there is no workspace, and the
grid depends on the device and the sizes alone: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

import ctypes

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.cuda.launch import fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.integer import Int4Weight

SOURCE = "sm90_skinny_gemm_w4a16.cu"
INPUTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", E4M3: "__nv_fp8_e4m3"}
COLUMNS = (8, 16)  # numbers of tokens that are compiled; others are rounded up
MAX_TOKENS = COLUMNS[-1]
TILE = 16  # output features
SHARED_TILES = 4  # of an SM: with more, two CTAs divide them; with fewer, CTAs of the next launch start beside one

POINTERS = ("x", "qweight", "group_scales", "tile_scales", "channel_scale", "bias", "out")
COUNTS = (
    "num_tokens", "out_features", "in_features", "columns", "groups_per_block", "is_channelwise", "out_is_half",
    "num_ctas", "ctas_per_sm", "is_dependent", "is_gated",
)  # fmt: skip


class SkinnyGemmW4A16Params(ctypes.Structure):
    """csrc/params/skinny_gemm_w4a16_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride",), COUNTS)


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose the library for x of `dtype`."""
    return (f"SLIPSTREAM_INPUT={INPUTS[dtype]}",)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(dtype) for dtype in (torch.bfloat16, torch.float16)]


def skinny_gemm_w4a16(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor, gated: bool = False
) -> None:
    """out = x @ dequantised(weight).T + bias, of at most MAX_TOKENS rows.  One launch.

    x: [num_tokens, in_features] bf16 or fp16, rows at multiples of 16 bytes.  weight: repacked.
    out: [num_tokens, out_features], contiguous, x's dtype; bias too.
    gated: out = silu(first half) * second half of columns; then out_features is a multiple of 32.
    """
    num_tokens, num_sms, tiles = x.shape[0], count_sms(x.device), weight.out_features // TILE
    if num_tokens == 0:
        return
    ctas_per_sm = 2 if num_tokens <= COLUMNS[0] and tiles > SHARED_TILES * num_sms else 1
    params = SkinnyGemmW4A16Params(
        **weight_arguments(weight),
        x=x.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_row_stride=x.stride(0),
        num_tokens=num_tokens,
        columns=next(count for count in COLUMNS if count >= num_tokens),
        out_is_half=out.dtype == torch.float16,
        num_ctas=ctas_per_sm * min(num_sms, tiles),
        ctas_per_sm=ctas_per_sm,
        is_dependent=launches_dependently(x.device),
        is_gated=gated,
    )
    launch("skinny_gemm_w4a16", load(SOURCE, defines(x.dtype)), params, x.device)


def weight_arguments(weight: Int4Weight) -> dict[str, int]:
    """The arguments that say what a repacked weight is and where."""
    assert weight.zeros is not None
    by_block, by_tile = weight.scales
    return {
        "qweight": weight.packed.data_ptr(),
        "group_scales": by_block.data_ptr(),
        "tile_scales": by_tile.data_ptr(),
        "channel_scale": weight.zeros.data_ptr(),
        "out_features": weight.out_features,
        "in_features": weight.in_features,
        "groups_per_block": by_block.shape[2],
        "is_channelwise": by_block.shape[0] == 1,
    }
