"""quantize_int8: contract and choice.  Rows of activations or weights to int8."""

from __future__ import annotations

import torch

from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.select import require_float, require_unit_stride, select


def quantize_int8(x: torch.Tensor, scale: torch.Tensor | None = None, *, backend: str = "auto") -> Int8Rows:
    """Quantise each row by its largest magnitude: scale = amax / 127, value = x * (127 / amax).

    x: [num_rows, size], last dimension contiguous.  scale: one fp32 number on x's device for all rows (static
    quantisation); then value = x * (1 / scale).  Arithmetic is fp32, rounding to nearest even, saturating at ±127.
    """
    require_float("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [num_rows, size]")
    require_unit_stride("x", x)
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"scale: {scale.dtype} {tuple(scale.shape)}, expected one float32")
    return select("gemm.quantize_int8", backend, x).quantize_int8(x, scale)
