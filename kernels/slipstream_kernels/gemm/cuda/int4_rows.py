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

SOURCE = "sm90_int4_rows.cu"
INPUTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", E4M3: "__nv_fp8_e4m3"}
COLUMNS = (8, 16)  # numbers of tokens that are compiled; others are rounded up
MAX_TOKENS = COLUMNS[-1]
STRIP = 16  # output features
SHARED_STRIPS = 4  # of an SM, from which on two CTAs share them: below, the next launch's CTAs come up instead

POINTERS = ("x", "codes", "words", "strip_words", "channel_scale", "bias", "out")
COUNTS = (
    "num_tokens", "out_features", "in_features", "columns", "groups_per_block", "is_channelwise", "out_is_half",
    "num_ctas", "ctas_per_sm", "is_dependent", "is_gated",
)  # fmt: skip


class Int4RowsParams(ctypes.Structure):
    """csrc/params/int4_rows_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride",), COUNTS)


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose the library for x of `dtype`."""
    return (f"SLIPSTREAM_INPUT={INPUTS[dtype]}",)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(dtype) for dtype in (torch.bfloat16, torch.float16)]


def int4_rows(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor, gated: bool = False
) -> None:
    """out = x @ dequantised(weight).T + bias, of at most MAX_TOKENS rows.  One launch.

    x: [num_tokens, in_features] bf16 or fp16, rows at multiples of 16 bytes.  weight: repacked.
    out: [num_tokens, out_features], contiguous, x's dtype; bias too.
    gated: out = silu(first half) * second half of columns; then out_features is a multiple of 32.
    """
    num_tokens, num_sms, strips = x.shape[0], count_sms(x.device), weight.out_features // STRIP
    if num_tokens == 0:
        return
    ctas_per_sm = 2 if num_tokens <= COLUMNS[0] and strips > SHARED_STRIPS * num_sms else 1
    params = Int4RowsParams(
        **weight_arguments(weight),
        x=x.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_row_stride=x.stride(0),
        num_tokens=num_tokens,
        columns=next(count for count in COLUMNS if count >= num_tokens),
        out_is_half=out.dtype == torch.float16,
        num_ctas=ctas_per_sm * min(num_sms, strips),
        ctas_per_sm=ctas_per_sm,
        is_dependent=launches_dependently(x.device),
        is_gated=gated,
    )
    launch("int4_rows", load(SOURCE, defines(x.dtype)), params, x.device)


def weight_arguments(weight: Int4Weight) -> dict[str, int]:
    """The arguments that say what a repacked weight is and where."""
    assert weight.zeros is not None
    words, strip_words = weight.scales
    return {
        "codes": weight.packed.data_ptr(),
        "words": words.data_ptr(),
        "strip_words": strip_words.data_ptr(),
        "channel_scale": weight.zeros.data_ptr(),
        "out_features": weight.out_features,
        "in_features": weight.in_features,
        "groups_per_block": words.shape[2],
        "is_channelwise": words.shape[0] == 1,
    }
