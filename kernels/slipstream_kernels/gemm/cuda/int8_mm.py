"""int8_mm in CUDA, of float rows and repacked weights: the choice of a kernel by the number of rows.  Hopper only.

Few rows stream past the weight (skinny_gemm); up to 256 are multiplied in tiles as it is read (mixed_gemm); for more it
is written out in 16 bits once and multiplied by the library (docs/measurements).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.cuda.build import missing
from slipstream_kernels.cuda.device import refusal as device_refusal
from slipstream_kernels.gemm import int8_layout
from slipstream_kernels.gemm.cuda import mixed_gemm, skinny_gemm
from slipstream_kernels.gemm.triton.int8_dequantise import int8_dequantise

MAX_STREAMED_TOKENS = skinny_gemm.MAX_CHOSEN_TOKENS[torch.int32]


def refusal(values: torch.Tensor) -> str | None:
    """Why this version cannot serve int8 values [out_features, in_features]; None if it can."""
    if (reason := device_refusal(values.device, "the weight is")) is not None:
        return reason
    if (reason := int8_layout.refusal(*values.shape)) is not None:
        return reason
    streamed = missing(skinny_gemm.SOURCE, skinny_gemm.defines(torch.bfloat16, torch.int32, by_blocks=False))
    return streamed or missing(mixed_gemm.SOURCE, mixed_gemm.defines(torch.bfloat16, mixed_gemm.COLUMNS[-1]))


def can_gate(x: torch.Tensor, words: torch.Tensor) -> bool:
    """Whether int8_mm takes `gated` with these rows."""
    if _is_written_out(x):
        return False
    return x.shape[0] <= MAX_STREAMED_TOKENS or words.shape[0] % (2 * int8_layout.STRIP) == 0


def int8_mm(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    """See ops.int8_mm; words: as repack_int8 made them."""
    bias = None if bias is None else bias.to(x.dtype)
    if _is_written_out(x):
        return F.linear(x, int8_dequantise(words, scales, x.dtype), bias)
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # rows begin at multiples of 16 bytes
    if x.shape[0] <= MAX_STREAMED_TOKENS:
        return skinny_gemm.skinny_gemm(x, words, scales, bias, gated)
    return mixed_gemm.mixed_gemm(x, words, scales, bias, gated)


def _is_written_out(x: torch.Tensor) -> bool:
    return x.shape[0] > mixed_gemm.MAX_TOKENS or x.dtype not in mixed_gemm.OPERANDS
