"""int4_mm of 16-bit rows in CUDA, for repacked weights: the choice of a kernel by the number of rows.  Hopper only.

Up to 64 tokens the weights' bytes are the bound: int4_stream.  More are multiplied 64 at a time as long as that is
faster than to write the weights out in 16 bits once and multiply those by the library (docs/measurements).
FP8 rows: w4a8_mm.
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
MAX_STREAMED_TOKENS = 2 * MAX_TOKENS  # of 16-bit rows


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


def can_gate(num_tokens: int, weight: Int4Weight) -> bool:
    """Whether int4_mm_gated takes so many 16-bit rows."""
    return num_tokens <= int4_stream.MAX_ROWS_TOKENS and weight.out_features % (2 * int4_stream.STRIP) == 0


def int4_mm_gated(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(first half of the columns of int4_mm) * second half, in one launch."""
    _require_16_bits(x)
    out = torch.empty((x.shape[0], weight.out_features // 2), dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.to(x.dtype)
    int4_stream.int4_stream(_aligned(x), weight, bias, out, gated=True)
    return out


def int4_mm(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ops.int4_mm; weight is repacked."""
    _require_16_bits(x)
    bias = None if bias is None else bias.to(x.dtype)
    num_tokens = x.shape[0]
    if num_tokens > MAX_STREAMED_TOKENS:
        return F.linear(x, dequantise(weight, x.dtype), bias)
    out = torch.empty((num_tokens, weight.out_features), dtype=x.dtype, device=x.device)
    for start in range(0, num_tokens, MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        int4_stream.int4_stream(_aligned(x)[part], weight, bias, out[part])
    return out


def _require_16_bits(x: torch.Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x: dtype {x.dtype} is not bfloat16 or float16, which a repacked weight is multiplied by")


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Rows that begin at multiples of 16 bytes."""
    if rows.stride(0) * rows.element_size() % 16 or rows.data_ptr() % 16:
        return rows.contiguous()
    return rows


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
