"""int4_mm of 16-bit rows in CUDA, for repacked weights, by each of its kernels.  Hopper only.

gemm/tuning.py says which of them is the fastest for how many rows.  Rows begin at multiples of 16 bytes, bias has their
type, bf16 or fp16.  FP8 rows: w4a8_mm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.cuda.launch import launch
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.cuda import mixed_gemm, mixed_gemm_pairs, mixed_gemm_w4a16, skinny_gemm_w4a16
from slipstream_kernels.gemm.cuda.skinny_gemm_w4a16 import SkinnyGemmW4A16Params
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.norm.gated_mul import silu_mul

DEQUANTISE = "sm90_int4_dequantise.cu"


def refusal(weight: Int4Weight) -> str | None:
    """Why this version cannot serve a canonical weight; None if it can."""
    device = weight.packed.device
    if (reason := hopper_refusal(device, "the weight is")) is not None:
        return reason
    sizes = int4_layout.refusal(weight.out_features, weight.in_features, weight.group_size)
    if sizes is not None:
        return sizes
    few = build_refusal(skinny_gemm_w4a16.SOURCE, skinny_gemm_w4a16.defines(torch.bfloat16))
    columns = mixed_gemm_w4a16.COLUMNS[-1]
    return (
        few
        or build_refusal(mixed_gemm.SOURCE, mixed_gemm_w4a16.format_of(torch.bfloat16, 1).defines(columns))
        or build_refusal(DEQUANTISE, ())
    )


def rows(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, gated: bool, config: tuple[int, ...]
) -> torch.Tensor:
    """See ops.int4_mm; up to skinny_gemm_w4a16.MAX_TOKENS rows; config says nothing.  One launch."""
    width = weight.out_features // 2 if gated else weight.out_features
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    skinny_gemm_w4a16.skinny_gemm_w4a16(x, weight, bias, out, gated)
    return out


def pairs(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, gated: bool, config: tuple[int, ...]
) -> torch.Tensor:
    """See ops.int4_mm; bf16 rows that a tile of config, which is of its Variant, holds.  Two launches.

    A third one applies the gate: in the product it took longer (docs/measurements/gemm.md).
    """
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    mixed_gemm_pairs.mixed_gemm_pairs(x, weight, bias, out, mixed_gemm.Variant(*config))
    return silu_mul(out) if gated else out


def mixed(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, gated: bool, config: tuple[int, ...]
) -> torch.Tensor:
    """See ops.int4_mm; not gated, rows of the tiles of config, which is of its Variant.  Two launches."""
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    mixed_gemm_w4a16.mixed_gemm_w4a16(x, weight, bias, out, mixed_gemm.Variant(*config))
    return out


def written_out(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, gated: bool, config: tuple[int, ...]
) -> torch.Tensor:
    """See ops.int4_mm; not gated; config says nothing.  The library multiplies weights that are written in 16 bits."""
    return F.linear(x, dequantise(weight, x.dtype), bias)


def dequantise(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out_features, in_features] of bf16 or fp16 of a repacked weight."""
    device = weight.packed.device
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=device)
    params = SkinnyGemmW4A16Params(
        **skinny_gemm_w4a16.weight_arguments(weight), out=out.data_ptr(), out_is_half=dtype == torch.float16
    )
    library = load(DEQUANTISE, ())
    launch("int4_dequantise", library, params, device)
    return out
