"""gated_mul_fp8 in plain torch: the two ops it fuses, one after the other."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm.reference.quantize_fp8 import quantize_fp8
from slipstream_kernels.norm.reference.gated_mul import gated_mul


def gated_mul_fp8(x: torch.Tensor, activation: str, scheme: Fp8Scheme) -> Fp8Rows:
    """See ops.gated_mul_fp8."""
    return quantize_fp8(gated_mul(x, activation, None), scheme)
