"""int4_mm of 16-bit rows in CUDA, for repacked weights, by each of its kernels.  Hopper only.

gemm/tuning.py says which of them is the fastest for how many rows.  Rows begin at multiples of 16 bytes, bias has their
type, bf16 or fp16.  FP8 rows: w4a8_mm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import refusal as device_refusal
from slipstream_kernels.cuda.launch import launch
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda import int4_stream
from slipstream_kernels.gemm.cuda.int4_stream import MAX_TOKENS, Int4StreamParams
from slipstream_kernels.integer import Int4Weight

DEQUANTISE = "sm90_int4_dequantise.cu"


def refusal(weight: Int4Weight) -> str | None:
    """Why this version cannot serve a canonical weight; None if it can."""
    device = weight.packed.device
    if (reason := device_refusal(device, "the weight is")) is not None:
        return reason
    sizes = int4_layout.refusal(weight.out_features, weight.in_features, weight.group_size)
    if sizes is not None or weight.out_features > int4_stream.MAX_TILES * int4_stream.TILE_ROWS:
        return sizes or f"out_features: {weight.out_features} are too many"
    if weight.in_features > int4_stream.MAX_IN_FEATURES:
        return f"in_features: {weight.in_features} are more than {int4_stream.MAX_IN_FEATURES}"
    return missing(int4_stream.TILES, int4_stream.defines(torch.bfloat16))


def rows(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """See ops.int4_mm; up to int4_stream.MAX_ROWS_TOKENS rows.  One launch."""
    width = weight.out_features // 2 if gated else weight.out_features
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    int4_stream.int4_stream(x, weight, bias, out, source=int4_stream.ROWS, gated=gated)
    return out


def stream(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """See ops.int4_mm; not gated.  A launch for every MAX_TOKENS rows."""
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    for start in range(0, x.shape[0], MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        int4_stream.int4_stream(x[part], weight, bias, out[part])
    return out


def written_out(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """See ops.int4_mm; not gated.  The weights are written in 16 bits first, which the library multiplies."""
    return F.linear(x, dequantise(weight, x.dtype), bias)


def dequantise(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out_features, in_features] of bf16 or fp16 of a repacked weight."""
    device = weight.packed.device
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=device)
    params = Int4StreamParams(
        **int4_stream.weight_arguments(weight), out=out.data_ptr(), out_is_half=dtype == torch.float16
    )
    library = load(DEQUANTISE, ())
    launch("int4_dequantise", library, params, device)
    return out
