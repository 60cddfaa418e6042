"""skinny_gemm in plain torch: the weight dequantised, multiplied in fp32."""

from __future__ import annotations

import torch

from slipstream_kernels.gemm import int8_layout
from slipstream_kernels.gemm.reference.scaled_mm import dequantize_weight


def skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    """See ops.skinny_gemm."""
    weight = int8_layout.unpack(weight) if weight.dtype == torch.int32 else weight
    wide = weight.float() if scales is None else dequantize_weight(weight, scales)
    y = x.float() @ wide.t()
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y.to(x.dtype)
