"""Which int8 weights have kernels for float rows in CUDA.  Hopper only.

Few rows stream past the weight (skinny_gemm); up to 256 are multiplied in tiles as it is read (mixed_gemm); for more it
is written out in 16 bits once and multiplied by the library (gemm/tuning.py).
"""

from __future__ import annotations

import torch

from slipstream_kernels.cuda.build import build_refusal
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.gemm import int8_layout
from slipstream_kernels.gemm.cuda import mixed_gemm, skinny_gemm


def refusal(values: torch.Tensor) -> str | None:
    """Why this version cannot serve int8 values [out_features, in_features]; None if it can."""
    if (reason := hopper_refusal(values.device, "the weight is")) is not None:
        return reason
    if (reason := int8_layout.refusal(*values.shape)) is not None:
        return reason
    streamed = build_refusal(skinny_gemm.SOURCE, skinny_gemm.defines(torch.bfloat16, torch.int32, by_blocks=False))
    return streamed or build_refusal(
        mixed_gemm.SOURCE, mixed_gemm.format_of(torch.bfloat16).defines(mixed_gemm.COLUMNS[-1])
    )
