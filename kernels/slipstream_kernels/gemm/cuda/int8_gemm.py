"""W8A8 products of many tokens on CUTLASS: exact int32 sums, scaled and biased in the epilogue.  Hopper only.

No device value is read on the host and there is no workspace: CUDA-graph safe, on any stream.
"""

from __future__ import annotations

import ctypes

import torch

from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.cuda.launch import fields
from slipstream_kernels.gemm.cuda import cutlass_gemm
from slipstream_kernels.gemm.cuda.cutlass_gemm import COMMON, OUTPUTS, Tile
from slipstream_kernels.gemm.tuning import tuning_of
from slipstream_kernels.integer import Int8Rows

SOURCE = "sm90_int8_gemm.cu"
WIDE, NARROW = Tile(128, 256, 2), Tile(128, 128, 2)
TILES = (WIDE, NARROW)
ALIGNMENT = 16  # features of a weight are multiples of it

POINTERS = ("x", "token_scale", "weight", "channel_scale", "bias", "out")
COUNTS = ("num_tokens", "out_features", "in_features", *COMMON)


class Int8GemmParams(ctypes.Structure):
    """csrc/params/int8_gemm_params.h, field by field."""

    _fields_ = fields(POINTERS, int32s=COUNTS)


def variants(dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, ...]]:
    """The libraries of models of `dtype`, by tile; for building ahead of time."""
    return [tile.defines(dtype) for tile in TILES]


def refusal(rows: Int8Rows, weight: torch.Tensor) -> str | None:
    """Why this version cannot multiply these; None if it can."""
    return product_refusal(weight.device, rows.dtype, (weight.shape[0], weight.shape[1]))


def product_refusal(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int]) -> str | None:
    """The same of a weight of such sizes, and results of `dtype`."""
    if (reason := hopper_refusal(device, "the weight is")) is not None:
        return reason
    if dtype not in OUTPUTS:
        return f"results are {dtype}, not bfloat16 or float16"
    if any(size % ALIGNMENT for size in sizes):
        return f"the weight's features are not multiples of {ALIGNMENT}"
    return cutlass_gemm.refusal(SOURCE, tuple(variants(dtype)))


def int8_gemm(
    rows: Int8Rows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None
) -> torch.Tensor:
    """See ops.int8_mm, of int8 rows.  One launch.  tile: None: the fastest by the sizes."""
    device, num_tokens, out_features = weight.device, rows.num_tokens, weight.shape[0]
    out = torch.empty((num_tokens, out_features), dtype=rows.dtype, device=device)
    if not num_tokens:
        return out
    bias = None if bias is None else bias.to(rows.dtype)
    if tile is None:
        narrow_cost = tuning_of(torch.cuda.get_device_name(device)).narrow_tile_costs["int8_gemm"]
        tile = cutlass_gemm.choose_tile(TILES, num_tokens, out_features, count_sms(device), narrow_cost)
    libraries = cutlass.load_all(SOURCE, tuple(variants(rows.dtype)))
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
    )
    cutlass_gemm.launch_gemm("int8_gemm", libraries[TILES.index(tile)], params, device)
    return out
