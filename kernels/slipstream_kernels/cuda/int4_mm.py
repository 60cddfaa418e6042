"""int4_mm in CUDA, for repacked weights: the choice of a kernel by the kind of rows and their number.  Hopper only.

Up to 64 tokens the weights' bytes are the bound: int4_stream has kernels of 16-bit rows, w4a8_stream one of FP8 rows.
Beyond, FP8 rows go to CUTLASS (w4a8_gemm); 16-bit rows are multiplied 64 at a time as long as that is faster than to
write the weights out in 16 bits once and multiply those by the library (docs/LOG.md).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from slipstream_kernels import int4_layout
from slipstream_kernels.cuda import int4_stream, w4a8_gemm, w4a8_stream
from slipstream_kernels.cuda.build import load, missing
from slipstream_kernels.cuda.device import refusal as device_refusal
from slipstream_kernels.cuda.int4_stream import MAX_TOKENS, Int4StreamParams
from slipstream_kernels.cuda.launch import launch
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight

LOG = logging.getLogger(__name__)
DEQUANTISE = "int4_dequantise.cu"
MAX_STREAMED_TOKENS = 2 * MAX_TOKENS  # of 16-bit rows
MAX_PLAIN_TOKENS = int4_stream.MAX_ROWS_TOKENS  # so many 16-bit rows take no longer than FP8 rows


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


def int4_mm(x: torch.Tensor | Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ops.int4_mm; weight is repacked."""
    _require_16_bits(x)
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(x, Fp8Rows):
        return _multiply_fp8(replace(x, values=_aligned(x.values)), weight, bias)
    num_tokens = x.shape[0]
    if num_tokens > MAX_STREAMED_TOKENS:
        return F.linear(x, dequantise(weight, x.dtype), bias)
    out = torch.empty((num_tokens, weight.out_features), dtype=x.dtype, device=x.device)
    for start in range(0, num_tokens, MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        int4_stream.int4_stream(_aligned(x)[part], weight, bias, out[part])
    return out


def _multiply_fp8(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    num_tokens = rows.num_tokens
    out = torch.empty((num_tokens, weight.out_features), dtype=rows.dtype, device=rows.values.device)
    if num_tokens <= w4a8_stream.MAX_TOKENS:
        w4a8_stream.w4a8_stream(rows, weight, bias, out)
        return out
    if _many_rows_refusal(rows.dtype) is None:
        w4a8_gemm.w4a8_gemm(rows, weight, bias, out)
        return out
    plain = (rows.values.float() * rows.scales).to(rows.dtype)
    return int4_mm(plain, weight, bias)


def _require_16_bits(x: torch.Tensor | Fp8Rows) -> None:
    if x.dtype not in w4a8_gemm.OUTPUTS:
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


@lru_cache
def _many_rows_refusal(dtype: torch.dtype) -> str | None:
    reason = w4a8_gemm.refusal(dtype)
    if reason is not None:
        LOG.warning("products of more than %d FP8 rows with 4-bit weights run in 16 bits: %s", MAX_TOKENS, reason)
    return reason
