"""swap_ab_gemm in plain torch: both operands dequantised, multiplied in fp32."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm.reference.scaled_mm import dequantize_rows, dequantize_weight


def swap_ab_gemm(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    """See ops.swap_ab_gemm."""
    rows = dequantize_rows(x) if isinstance(x, Fp8Rows) else x.float()
    wide = weight.float() if scales is None else dequantize_weight(weight, scales)
    y = rows @ wide.t()
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y.to(x.dtype)
