"""grouped_mm by torch (CUTLASS), for many rows an expert.  CUDA only; gathering rows is a launch of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.routing import Routing


def grouped_mm(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    routing: Routing,
    scales: torch.Tensor | None,
    by_token: bool,
    gated: bool,
) -> torch.Tensor:
    """See ops.grouped_mm; x and weight are both of bf16, or both of e4m3."""
    ends = routing.offsets[1:]
    if isinstance(x, Fp8Rows):
        rows = x.values.view(torch.uint8)[routing.tokens].view(x.values.dtype) if by_token else x.values
        row_scales = x.scales.view(-1)[routing.tokens] if by_token else x.scales.view(-1)
        y = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # newer than its stub
            rows,
            weight.transpose(1, 2),
            row_scales,
            ScalingType.RowWise,
            scales,
            ScalingType.RowWise,
            offs=ends,
            output_dtype=x.dtype,
            use_fast_accum=False,
        )
    else:
        y = F.grouped_mm(x[routing.tokens] if by_token else x, weight.transpose(1, 2), offs=ends)
    return silu_mul(y) if gated else y
