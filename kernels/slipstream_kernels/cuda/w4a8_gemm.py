"""W4A8 products of many tokens on CUTLASS: chooses a configuration, fills its arguments, launches it.  Hopper only.

A configuration is a library of its own, a minute of compiling: all are built on first use with a line in the log, or by
`python -m slipstream_kernels.cuda.build`.  No device value is read on the host and there is no workspace: CUDA-graph
safe, on any stream.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.build import is_built, missing
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight

SOURCE = "w4a8_gemm.cu"
OUTPUTS = {torch.bfloat16: "bfloat16_t", torch.float16: "half_t"}
BLOCK = 128

POINTERS = ("x", "token_scale", "codes", "words", "channel_scale", "bias", "out", "workspace")
COUNTS = ("num_tokens", "out_features", "in_features", "tiled_group", "device", "num_sms", "is_dependent")


class W4a8Params(ctypes.Structure):
    """include/w4a8_params.h, field by field."""

    _fields_ = [*((name, ctypes.c_void_p) for name in POINTERS), *((name, ctypes.c_int32) for name in COUNTS)]


@dataclass(frozen=True)
class Tile:
    """A configuration: output features and tokens of a tile, and tiles of output features that share their tokens."""

    rows: int
    tokens: int
    cluster: int


WIDE = Tile(128, 256, 2)
NARROW = Tile(128, 128, 2)
TILES = (WIDE, NARROW)
NARROW_COST = 0.75  # time of a narrow tile, of a wide one's (docs/LOG.md)


def defines(tile: Tile, groups: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose a library.  groups: of 128 input features, 1 or 2."""
    return (
        f"SLIPSTREAM_TILE_ROWS={tile.rows}",
        f"SLIPSTREAM_TILE_TOKENS={tile.tokens}",
        f"SLIPSTREAM_CLUSTER={tile.cluster}",
        f"SLIPSTREAM_GROUPS={groups}",
        f"SLIPSTREAM_OUT={OUTPUTS[dtype]}",
        "SLIPSTREAM_STREAM_K=0",
    )


def variants() -> list[tuple[str, ...]]:
    """The libraries of bf16 models, for building ahead of time."""
    return [defines(tile, groups, torch.bfloat16) for tile in TILES for groups in (1, 2)]


def refusal(dtype: torch.dtype) -> str | None:
    """Why products with results of `dtype` cannot be had here; None if they can."""
    if dtype not in OUTPUTS:
        return f"results are {dtype}, not bfloat16 or float16"
    return next((reason for tile in TILES if (reason := _missing(tile, dtype)) is not None), None)


@lru_cache
def _missing(tile: Tile, dtype: torch.dtype) -> str | None:
    if is_built(SOURCE, defines(tile, 1, dtype), cutlass.FLAGS):
        return None
    return missing(SOURCE, defines(tile, 1, dtype), cutlass.FLAGS) or cutlass.missing()


def choose_tile(num_tokens: int, out_features: int, num_sms: int) -> Tile:
    """The tile whose waves of CTAs take the least time, by the time of one tile."""
    costs = {WIDE: 1.0, NARROW: NARROW_COST}

    def cost(tile: Tile) -> float:
        tiles = -(-num_tokens // tile.tokens) * -(-out_features // tile.rows)
        return -(-tiles // num_sms) * costs[tile]

    return min(TILES, key=cost)


def w4a8_gemm(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = dequantised(rows) @ table(weight).T + bias: weights are rounded to e4m3 of (code - zero) * scale.

    rows: scaled per token.  weight: repacked.  out: [num_tokens, out_features], contiguous, bf16 or fp16; bias too.
    """
    assert weight.zeros is not None
    device = out.device
    num_sms = count_sms(device)
    words = weight.scales[0]
    tile = choose_tile(rows.num_tokens, weight.out_features, num_sms)
    libraries = cutlass.load_all(SOURCE, tuple(defines(each, words.shape[2], out.dtype) for each in TILES))
    library = libraries[TILES.index(tile)]
    params = W4a8Params(
        x=rows.values.data_ptr(),
        token_scale=rows.scales.data_ptr(),
        codes=weight.packed.data_ptr(),
        words=words.data_ptr(),
        channel_scale=weight.zeros.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        num_tokens=rows.num_tokens,
        out_features=weight.out_features,
        in_features=weight.in_features,
        tiled_group=weight.in_features if words.shape[0] == 1 else BLOCK,
        device=device.index or 0,
        num_sms=num_sms,
        is_dependent=launches_dependently(device),
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    with torch.cuda.device(device):
        error = library.slipstream_w4a8_gemm(ctypes.byref(params), stream)
    if error != 0:
        raise RuntimeError(f"w4a8_gemm: {cutlass.error_text(library, error)}")
