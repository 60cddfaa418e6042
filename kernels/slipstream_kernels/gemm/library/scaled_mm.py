"""scaled_mm by torch (cuBLASLt): FP8 products at the peak for many rows.  CUDA only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from slipstream_kernels.fp8 import Fp8Rows


def scaled_mm(
    rows: Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.scaled_mm.  use_fast_accum stays off: it loses bits of long sums (tests/kernels/test_scaled_mm.py)."""
    if not rows.num_tokens:
        return torch.empty((0, weight.shape[0]), dtype=rows.dtype, device=weight.device)
    if scales.dim() == 1:
        recipes, weight_scales = (ScalingType.RowWise, ScalingType.RowWise), scales[None, :]
    else:
        recipes, weight_scales = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128), scales.t()
    values, row_scales = rows.padded or (rows.values, rows.scales)
    # Only a bias of the result's type, beside scales of rows, is added by the product itself.
    added = bias if bias is not None and scales.dim() == 1 and bias.dtype == rows.dtype == torch.bfloat16 else None
    y = F.scaled_mm(
        values,
        weight.t(),
        row_scales,
        recipes[0],
        weight_scales,
        recipes[1],
        bias=added,
        output_dtype=rows.dtype,
        use_fast_accum=False,
    )
    y = y[: rows.num_tokens]
    return y if bias is None or bias is added else y.add_(bias)
