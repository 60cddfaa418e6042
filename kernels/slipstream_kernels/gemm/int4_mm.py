"""int4_mm: contract.  16-bit or FP8 rows times 4-bit weights scaled by groups."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm.activation_quant import PLAIN
from slipstream_kernels.gemm.int4_checks import check_int4, group_refusal
from slipstream_kernels.gemm.linear import gated_linear, linear
from slipstream_kernels.gemm.linear_weight import int4_linear_weight
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select


def int4_mm(
    x: torch.Tensor | Fp8Rows,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Return x @ dequantised(weight).T + bias as [num_tokens, out_features], accumulated in fp32.

    gated: the first half of y's columns gates the second: returns silu(y[:, :half]) * y[:, half:].

    x: [num_tokens, in_features] fp32, bf16 or fp16, last dimension contiguous; or rows of e4m3 scaled per token (W4A8).
    The result has x's dtype.  weight: canonical (uint8) or as repack_int4 made it for x's device and kind of rows.
    bias: [out_features], any float dtype.
    Few bf16 rows are sums of two e4m3 numbers, which miss a number by at most 2^-21 of its group's largest.
    Codes less zero-points are exact in every type of product; group scales are applied to sums in fp32, or to weights
    in x's dtype.  FP8 sums leave the tensor core for fp32 at least every 128 input features.  Except: more than 64 FP8
    rows (128 or 256 of few output features) and a repacked weight, whose (code - zero) * scale is rounded to e4m3 (2 to
    3 % of a result's norm).
    backend: "cuda" is what a repacked weight of a GPU is multiplied by.
    """
    _check_rows(x, weight.in_features)
    if bias is not None:
        require_shape("bias", bias, (weight.out_features,))
    if not weight.is_repacked:
        check_int4(weight)
    if gated and weight.out_features % 2:
        raise ValueError(f"weight: {weight.out_features} output features, gated products need pairs")
    _require_own_rows(x, weight, backend)
    if backend == "auto" or (backend == "cuda" and weight.is_repacked):
        found = int4_linear_weight(weight, bias, fp8_rows=isinstance(x, Fp8Rows))
        return gated_linear(x, found, PLAIN) if gated else linear(x, found)
    if weight.is_repacked or backend == "cuda":
        wanted = "a weight of repack_int4" if backend == "cuda" else "a canonical weight"
        raise ValueError(f"backend: {backend!r} takes {wanted}")
    rows = x.values if isinstance(x, Fp8Rows) else x
    refusal = group_refusal(weight.group_size, weight.in_features)
    y = select("gemm.int4_mm", backend, rows, refusal).int4_mm(x, weight, bias)
    return silu_mul(y) if gated else y


def _require_own_rows(x: torch.Tensor | Fp8Rows, weight: Int4Weight, backend: str) -> None:
    if weight.is_for_fp8_rows and (not isinstance(x, Fp8Rows) or backend not in ("auto", "cuda")):
        raise ValueError('weight: repacked for FP8 rows, takes those alone, and backend "auto" or "cuda"')
    if weight.is_repacked and not weight.is_for_fp8_rows and isinstance(x, Fp8Rows):
        raise ValueError("weight: repacked for 16-bit rows, takes those alone")


def _check_rows(x: torch.Tensor | Fp8Rows, in_features: int) -> None:
    if isinstance(x, Fp8Rows):
        require_shape("x.values", x.values, (x.num_tokens, in_features))
        require_shape("x.scales", x.scales, (x.num_tokens, 1))
        if x.values.dtype != E4M3:
            raise ValueError(f"x.values: dtype {x.values.dtype}, expected {E4M3}")
        return
    require_float("x", x)
    require_shape("x", x, (x.shape[0], in_features))
    require_unit_stride("x", x)
