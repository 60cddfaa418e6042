"""W8A8 products of many tokens on CUTLASS: exact int32 sums, scaled and biased in the epilogue.  Hopper only.

A configuration is a library of its own, a minute of compiling: all are built on first use with a line in the log, or by
`python -m slipstream_kernels.cuda.build`.  No device value is read on the host and there is no workspace: CUDA-graph
safe, on any stream.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.build import is_built, missing
from slipstream_kernels.cuda.device import count_sms, is_hopper
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.integer import Int8Rows

SOURCE = "int8_gemm.cu"
OUTPUTS = {torch.bfloat16: "bfloat16_t", torch.float16: "half_t"}
# Tokens and output features of a tile, and the tiles of tokens that share weights.
WIDE, NARROW = (128, 256, 2), (128, 128, 2)
TILES = (WIDE, NARROW)
NARROW_COST = 0.57  # time of a narrow tile, of a wide one's (docs/LOG.md)
ALIGNMENT = 16  # features of a weight are multiples of it

POINTERS = ("x", "token_scale", "weight", "channel_scale", "bias", "out")
COUNTS = ("num_tokens", "out_features", "in_features", "device", "num_sms", "is_dependent")


class Int8GemmParams(ctypes.Structure):
    """include/int8_gemm_params.h, field by field."""

    _fields_ = [*((name, ctypes.c_void_p) for name in POINTERS), *((name, ctypes.c_int32) for name in COUNTS)]


def defines(tile: tuple[int, int, int], dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that choose a library."""
    tokens, rows, cluster = tile
    return (
        f"SLIPSTREAM_TILE_TOKENS={tokens}",
        f"SLIPSTREAM_TILE_ROWS={rows}",
        f"SLIPSTREAM_CLUSTER={cluster}",
        f"SLIPSTREAM_OUT={OUTPUTS[dtype]}",
    )


def variants() -> list[tuple[str, ...]]:
    """The libraries of bf16 models, for building ahead of time."""
    return [defines(tile, torch.bfloat16) for tile in TILES]


def refusal(rows: Int8Rows, weight: torch.Tensor) -> str | None:
    """Why this version cannot multiply these; None if it can."""
    if not weight.is_cuda:
        return f"the weight is on {weight.device}"
    if not is_hopper(weight.device):
        return "the GPU is not a Hopper (compute capability 9.0)"
    if rows.dtype not in OUTPUTS:
        return f"results are {rows.dtype}, not bfloat16 or float16"
    if any(size % ALIGNMENT for size in weight.shape):
        return f"the weight's features are not multiples of {ALIGNMENT}"
    return _missing(rows.dtype)


@lru_cache
def _missing(dtype: torch.dtype) -> str | None:
    if all(is_built(SOURCE, defines(tile, dtype), cutlass.FLAGS) for tile in TILES):
        return None
    return missing(SOURCE, defines(WIDE, dtype), cutlass.FLAGS) or cutlass.missing()


def int8_gemm(rows: Int8Rows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See ops.int8_mm, of int8 rows.  One launch."""
    device, num_tokens, out_features = weight.device, rows.num_tokens, weight.shape[0]
    out = torch.empty((num_tokens, out_features), dtype=rows.dtype, device=device)
    if not num_tokens:
        return out
    bias = None if bias is None else bias.to(rows.dtype)
    num_sms = count_sms(device)
    libraries = cutlass.load_all(SOURCE, tuple(defines(tile, rows.dtype) for tile in TILES))
    library = libraries[TILES.index(_tile(num_tokens, out_features, num_sms))]
    params = Int8GemmParams(
        x=rows.values.data_ptr(),
        token_scale=rows.scales.data_ptr(),
        weight=weight.data_ptr(),
        channel_scale=scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        num_tokens=num_tokens,
        out_features=out_features,
        in_features=weight.shape[1],
        device=device.index or 0,
        num_sms=num_sms,
        is_dependent=launches_dependently(device),
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    with torch.cuda.device(device):
        error = library.slipstream_int8_gemm(ctypes.byref(params), stream)
    if error != 0:
        raise RuntimeError(f"int8_gemm: {cutlass.error_text(library, error)}")
    return out


def _tile(num_tokens: int, out_features: int, num_sms: int) -> tuple[int, int, int]:
    """The tile whose waves of CTAs take the least time, by the time of one tile."""

    def cost(tile: tuple[int, int, int]) -> float:
        tiles = -(-num_tokens // tile[0]) * -(-out_features // tile[1])
        return -(-tiles // num_sms) * (1.0 if tile == WIDE else NARROW_COST)

    return min(TILES, key=cost)
