"""Products of few tokens with 4-bit weights in CUDA: chooses a kernel, fills its arguments, launches it.  Hopper only.

Up to 16 tokens int4_rows: a CTA owns whole output features.  Up to 64 int4_stream: CTAs share tiles and add their sums
through a workspace.  No device value is read on the host, and grid and workspace depend on the device and the sizes
alone: CUDA-graph safe.  Launches on one device must follow each other (one stream).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.cuda.launch import fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.integer import Int4Weight

ROWS, TILES = "sm90_int4_rows.cu", "sm90_int4_stream.cu"
INPUTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", E4M3: "__nv_fp8_e4m3"}
ROWS_COLUMNS = (8, 16)  # numbers of tokens that each kernel is compiled for; others are rounded up
TILES_COLUMNS = (16, 32, 48, 64)
MAX_ROWS_TOKENS, MAX_TOKENS = ROWS_COLUMNS[-1], TILES_COLUMNS[-1]
STRIP, TILE_ROWS, BLOCK = 16, 128, 128  # output features of a strip and a tile, input features of a block
SHARED_STRIPS = 4  # of an SM, from which on two CTAs share them: below, the next launch's CTAs come up instead
MAX_TILES, MAX_IN_FEATURES = 8192, 1 << 16  # what the workspace has room for

POINTERS = (
    "x", "codes", "words", "strip_words", "channel_scale", "bias", "out", "arranged", "partials",
    "arrivals",
)  # fmt: skip
COUNTS = (
    "num_tokens", "out_features", "in_features", "columns", "groups_per_block", "is_channelwise", "out_is_half",
    "num_ctas", "ctas_per_sm", "is_dependent", "is_gated",
)  # fmt: skip


class Int4StreamParams(ctypes.Structure):
    """csrc/params/int4_stream_params.h, field by field."""

    _fields_ = fields(POINTERS, ("x_row_stride",), COUNTS)


@dataclass(frozen=True)
class Workspace:
    """What the CTAs of one launch exchange."""

    num_sms: int
    arranged: torch.Tensor
    partials: torch.Tensor
    arrivals: torch.Tensor


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose the library for x of `dtype`."""
    return (f"SLIPSTREAM_INPUT={INPUTS[dtype]}",)


def variants() -> list[tuple[str, tuple[str, ...]]]:
    """(source, macros) of all libraries, for building ahead of time."""
    return [(source, defines(dtype)) for source in (ROWS, TILES) for dtype in (torch.bfloat16, torch.float16)]


def int4_stream(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    source: str | None = None,
    gated: bool = False,
) -> None:
    """out = x @ dequantised(weight).T + bias, of at most MAX_TOKENS rows.  One launch.

    x: [num_tokens, in_features] bf16 or fp16, rows at multiples of 16 bytes.  weight: repacked.
    out: [num_tokens, out_features], contiguous, x's dtype; bias too.  source: else chosen by the number of tokens.
    gated: out = silu(first half) * second half of columns, of at most MAX_ROWS_TOKENS rows, an even number of strips.
    """
    if x.shape[0] == 0:
        return
    source = source or (ROWS if x.shape[0] <= MAX_ROWS_TOKENS else TILES)
    assert source == ROWS or not gated
    library = load(source, defines(x.dtype))
    params = _params(x, weight, bias, out, source == ROWS)
    params.is_gated = gated
    launch("int4_rows" if source == ROWS else "int4_stream", library, params, x.device)


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


@lru_cache
def workspace(device: torch.device) -> Workspace:
    """The device's workspace, made on first use: run a step before capturing CUDA graphs."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("int4_stream: first use on this device lies inside a graph capture; run it once before")
    num_sms = count_sms(device)
    # A CTA leaves at most two tiles' sums: of the tile that it goes on with, and of the one that it begins.
    partials = torch.empty(2 * num_sms * TILE_ROWS * MAX_TOKENS, dtype=torch.float32, device=device)
    arranged = torch.empty(MAX_IN_FEATURES * MAX_TOKENS, dtype=torch.bfloat16, device=device)
    return Workspace(num_sms, arranged, partials, torch.zeros(MAX_TILES, dtype=torch.int32, device=device))


def _params(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor, by_rows: bool
) -> Int4StreamParams:
    space, num_tokens = workspace(x.device), x.shape[0]
    strips, ctas_per_sm = weight.out_features // STRIP, 1
    if by_rows:
        ctas_per_sm = 2 if num_tokens <= ROWS_COLUMNS[0] and strips > SHARED_STRIPS * space.num_sms else 1
        num_ctas = ctas_per_sm * min(space.num_sms, strips)
    else:  # every CTA has work: those of a tile are counted
        num_ctas = min(space.num_sms, -(-weight.out_features // TILE_ROWS) * (weight.in_features // BLOCK))
    return Int4StreamParams(
        **weight_arguments(weight),
        x=x.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        arranged=space.arranged.data_ptr(),
        partials=space.partials.data_ptr(),
        arrivals=space.arrivals.data_ptr(),
        x_row_stride=x.stride(0),
        num_tokens=num_tokens,
        columns=next(count for count in (ROWS_COLUMNS if by_rows else TILES_COLUMNS) if count >= num_tokens),
        out_is_half=out.dtype == torch.float16,
        num_ctas=num_ctas,
        ctas_per_sm=ctas_per_sm,
        is_dependent=launches_dependently(x.device),
    )
