"""scaled_mm in plain torch: both operands dequantised, then multiplied in fp32."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import BLOCK, Fp8Rows


def scaled_mm(
    rows: Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.scaled_mm."""
    x, w = dequantize_rows(rows), dequantize_weight(weight, scales)
    y = x @ w.t()
    return (y if bias is None else y + bias.float()).to(rows.dtype)


def dequantize_weight(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[out_features, in_features] fp32; scales as ops.scaled_mm takes them."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    out_features, in_features = weight.shape
    columns = scales[:, : in_features // BLOCK].repeat_interleave(BLOCK, dim=1)
    return weight.float() * columns.repeat_interleave(BLOCK, dim=0)[:out_features]


def dequantize_rows(rows: Fp8Rows) -> torch.Tensor:
    """[num_tokens, size] fp32."""
    num_tokens, size, num_groups = rows.num_tokens, rows.values.shape[1], rows.scales.shape[1]
    wide = rows.values[:num_tokens].float().view(num_tokens, num_groups, size // num_groups)
    return (wide * rows.scales[:num_tokens, :, None]).view(num_tokens, size)
