"""Products of few tokens with 4-bit weights in CUDA: fills the kernel's arguments and launches it.  Hopper only.

No device value is read on the host, and the grid and workspace depend on the device and the sizes alone: CUDA-graph
safe.  Launches on one device must follow each other (one stream): they share a workspace.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.integer import Int4Weight

SOURCE = "int4_stream.cu"
INPUTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", E4M3: "__nv_fp8_e4m3"}
COLUMNS = (8, 16, 32, 48, 64)  # numbers of tokens that are compiled; others are rounded up
MAX_TOKENS = COLUMNS[-1]
TILE_ROWS = 128  # output features of a CTA's tile
BLOCK = 128  # input features of a block
MAX_TILES = 8192

POINTERS = ("x", "token_scale", "codes", "words", "channel_scale", "bias", "out", "partials", "arrivals")
COUNTS = (
    "num_tokens", "out_features", "in_features", "columns", "groups_per_block", "is_channelwise", "out_is_half",
    "num_ctas", "is_dependent",
)  # fmt: skip


class Int4StreamParams(ctypes.Structure):
    """include/int4_stream_params.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("x_row_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in COUNTS),
    ]


@dataclass(frozen=True)
class Workspace:
    """What the CTAs of one launch exchange."""

    num_sms: int
    partials: torch.Tensor
    arrivals: torch.Tensor


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose the library for x of `dtype`."""
    return (f"SLIPSTREAM_INPUT={INPUTS[dtype]}",)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(dtype) for dtype in INPUTS]


def int4_stream(
    x: torch.Tensor,
    token_scales: torch.Tensor | None,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out = x @ dequantised(weight).T * token_scales + bias, of at most MAX_TOKENS rows.  One launch.

    x: [num_tokens, in_features] bf16, fp16 or e4m3, rows at multiples of 16 bytes.  token_scales: fp32 [num_tokens].
    weight: repacked.  out: [num_tokens, out_features], contiguous, x's dtype or of e4m3 bf16 or fp16; bias too.
    """
    if x.shape[0] == 0:
        return
    library = load(SOURCE, defines(x.dtype))
    params = _params(x, token_scales, weight, bias, out)
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    with torch.cuda.device(x.device):
        error = library.slipstream_int4_stream(ctypes.byref(params), stream)
    if error != 0:
        library.slipstream_error_text.restype = ctypes.c_char_p
        raise RuntimeError(f"int4_stream: CUDA error {error}: {library.slipstream_error_text(error).decode()}")


@lru_cache
def workspace(device: torch.device) -> Workspace:
    """The device's workspace, made on first use: run a step before capturing CUDA graphs."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("int4_stream: first use on this device lies inside a graph capture; run it once before")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    # A CTA leaves at most two tiles' sums: of the tile that it goes on with, and of the one that it begins.
    partials = torch.empty(2 * num_sms * TILE_ROWS * MAX_TOKENS, dtype=torch.float32, device=device)
    return Workspace(num_sms, partials, torch.zeros(MAX_TILES, dtype=torch.int32, device=device))


def _params(
    x: torch.Tensor,
    token_scales: torch.Tensor | None,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> Int4StreamParams:
    space = workspace(x.device)
    assert weight.zeros is not None
    tensors = {
        "x": x, "token_scale": token_scales, "codes": weight.packed, "words": weight.scales,
        "channel_scale": weight.zeros, "bias": bias, "out": out, "partials": space.partials,
        "arrivals": space.arrivals,
    }  # fmt: skip
    num_tokens, in_features = x.shape
    num_blocks = -(-weight.out_features // TILE_ROWS) * (in_features // BLOCK)
    return Int4StreamParams(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        x_row_stride=x.stride(0),
        num_tokens=num_tokens,
        out_features=weight.out_features,
        in_features=in_features,
        columns=next(columns for columns in COLUMNS if columns >= num_tokens),
        groups_per_block=2 if weight.scales.dim() == 3 else 1,
        is_channelwise=weight.scales.shape[0] == 1,
        out_is_half=out.dtype == torch.float16,
        num_ctas=min(space.num_sms, num_blocks),  # every CTA has work: those of a tile are counted
        is_dependent=launches_dependently(x.device),
    )
