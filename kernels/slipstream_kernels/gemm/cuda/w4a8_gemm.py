"""W4A8 products of many tokens on CUTLASS: chooses a tile, fills its arguments, launches it.  Hopper only.

No device value is read on the host and there is no workspace: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

import ctypes

import torch

from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.launch import fields
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.cuda import cutlass_gemm
from slipstream_kernels.gemm.cuda.cutlass_gemm import COMMON, OUTPUTS, Tile
from slipstream_kernels.integer import Int4Weight

SOURCE = "sm90_w4a8_gemm.cu"
BLOCK = 128
WIDE, NARROW = Tile(256, 128, 2), Tile(128, 128, 2)
TILES = (WIDE, NARROW)

POINTERS = ("x", "token_scale", "qweight", "group_scales", "channel_scale", "bias", "out")
COUNTS = ("num_tokens", "out_features", "in_features", "tiled_group", *COMMON)


class W4a8Params(ctypes.Structure):
    """csrc/params/w4a8_params.h, field by field."""

    _fields_ = fields(POINTERS, int32s=COUNTS)


def defines(tile: Tile, groups: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose a library.  groups: of 128 input features, 1 or 2."""
    return (*tile.defines(dtype), f"SLIPSTREAM_GROUPS={groups}")


def variants() -> list[tuple[str, ...]]:
    """The libraries of bf16 models, for building ahead of time."""
    return [defines(tile, groups, torch.bfloat16) for tile in TILES for groups in (1, 2)]


def refusal(dtype: torch.dtype) -> str | None:
    """Why products with results of `dtype` cannot be had here; None if they can."""
    if dtype not in OUTPUTS:
        return f"results are {dtype}, not bfloat16 or float16"
    return cutlass_gemm.refusal(SOURCE, tuple(defines(tile, 1, dtype) for tile in TILES))


def w4a8_gemm(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile) -> None:
    """out = dequantised(rows) @ table(weight).T + bias: weights are (q - zero point) * scale rounded to e4m3.

    rows: scaled per token.  weight: repacked for FP8 rows.  out: [num_tokens, out_features], contiguous, bf16 or fp16;
    bias too.  tile: of TILES.
    """
    assert weight.zeros is not None
    group_scales = weight.scales
    libraries = cutlass.load_all(SOURCE, tuple(defines(each, group_scales.shape[2], out.dtype) for each in TILES))
    params = W4a8Params(
        x=rows.values.data_ptr(),
        token_scale=rows.scales.data_ptr(),
        qweight=weight.packed.data_ptr(),
        group_scales=group_scales.data_ptr(),
        channel_scale=weight.zeros.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        num_tokens=rows.num_tokens,
        out_features=weight.out_features,
        in_features=weight.in_features,
        tiled_group=weight.in_features if group_scales.shape[0] == 1 else BLOCK,
    )
    cutlass_gemm.launch_gemm("w4a8_gemm", libraries[TILES.index(tile)], params, out.device)
