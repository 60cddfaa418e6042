"""rms_norm_fp8 in plain torch: the two ops it fuses, one after the other."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm.reference.quantize_fp8 import quantize_fp8
from slipstream_kernels.norm.reference.rms_norm import rms_norm


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, scheme: Fp8Scheme
) -> tuple[Fp8Rows, torch.Tensor]:
    """See ops.rms_norm_fp8."""
    summed = x if residual is None else x + residual
    y = rms_norm(summed, weight, eps, None, None)
    assert isinstance(y, torch.Tensor)
    return quantize_fp8(y, scheme), summed
