"""quantize_fp8, quantize_fp8_blocks: contract and choice.  Rows of activations, rows or blocks of weights, to e4m3."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import BLOCK, PER_ROW, Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm.reference import quantize_fp8 as reference
from slipstream_kernels.select import require_float, require_unit_stride, select


def quantize_fp8(x: torch.Tensor, scheme: Fp8Scheme = PER_ROW, *, backend: str = "auto") -> Fp8Rows:
    """Quantise each row (or group of 128 columns of it) by its largest magnitude.

    scale = amax / 448, value = x * (448 / amax); x is about value * scale.
    x: [num_rows, size], last dimension contiguous.  Arithmetic is fp32, rounding to nearest even, saturating.  With a
    static scale v = x * (1 / scale).
    """
    require_float("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected [num_rows, size]")
    require_unit_stride("x", x)
    scheme.check(x.shape[1])
    return select("gemm.quantize_fp8", backend, x).quantize_fp8(x, scheme)


def quantize_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight by blocks of 128 x 128, the layout of DeepSeek-V3 (arXiv:2412.19437).

    weight: [out_features, in_features], in_features a multiple of 128.  Returns (values e4m3 of the same shape, scales
    [ceil(out_features / 128), in_features / 128] fp32).  Done once per weight, so plain torch on every device.
    """
    require_float("weight", weight)
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected [out_features, multiple of {BLOCK}]")
    return reference.quantize_fp8_blocks(weight)
