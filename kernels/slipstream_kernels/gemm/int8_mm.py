"""int8_mm: contract.  Float or int8 rows times int8 weights with one scale per output feature."""

from __future__ import annotations

import logging

import torch

from slipstream_kernels.gemm import int8_layout
from slipstream_kernels.gemm.activation_quant import PLAIN
from slipstream_kernels.gemm.linear import gated_linear, linear
from slipstream_kernels.gemm.linear_weight import int8_weight
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.norm.gated_mul import silu_mul
from slipstream_kernels.select import load_module, require_float, require_shape, require_unit_stride, select

LOG = logging.getLogger(__name__)


def int8_mm(
    x: torch.Tensor | Int8Rows,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    counters: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Return x @ (values * scales[:, None]).T + bias as [num_tokens, out_features]; the result has x's dtype.

    gated: the first half of y's columns gates the second: returns silu(y[:, :half]) * y[:, half:].

    x: [num_tokens, in_features] fp32, bf16 or fp16, last dimension contiguous (W8A16, accumulated in fp32); or int8
    rows scaled per token (W8A8, accumulated exactly in int32).  values: int8 [out_features, in_features], contiguous;
    or as repack_int8 made them, beside float rows alone.  More than 256 rows beside such are
    multiplied by the weight rounded to x's dtype.
    scales: fp32 [out_features].  bias: [out_features], any float dtype.  counters: `scaled_mm_counters(values)`, kept
    by the caller; without it one is made per call where sums are split.  backend: "cuda" is CUTLASS, of int8 rows;
    "auto" is ops.linear's choice.
    """
    _check(x, values, scales, bias, gated)
    is_repacked = values.dtype == torch.int32
    if is_repacked and (isinstance(x, Int8Rows) or backend not in ("auto", "cuda")):
        raise ValueError('values: a weight of repack_int8 takes float rows, and backend "auto" or "cuda"')
    if backend == "auto" or is_repacked:
        weight = int8_weight(values, scales, bias, counters, int8_rows=isinstance(x, Int8Rows))
        return gated_linear(x, weight, PLAIN) if gated else linear(x, weight)
    if backend == "cuda" and isinstance(x, Int8Rows):
        module = load_module("cuda", "gemm.int8_gemm")
        if (reason := module.refusal(x, values)) is not None:
            raise ValueError(f"backend: cuda cannot run int8_mm: {reason}")
        y = module.int8_gemm(x, values, scales, bias)
    else:
        rows = x.values if isinstance(x, Int8Rows) else x
        y = select("gemm.int8_mm", backend, rows).int8_mm(x, values, scales, bias, counters)
    return silu_mul(y) if gated else y


def repack_int8(values: torch.Tensor) -> torch.Tensor:
    """int8 values in the order of their device's kernels for 16-bit rows, made once at load; as they are where none.

    Takes as many bytes.  A shape that the device's kernels do not serve stays as it is.
    """
    if not values.is_cuda:
        return values
    reason = load_module("cuda", "gemm.int8_mm").refusal(values)
    if reason is not None:
        LOG.info("weight of %d x %d stays as it is: %s", *values.shape, reason)
        return values
    return int8_layout.repack(values)


def _check(
    x: torch.Tensor | Int8Rows, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, gated: bool
) -> None:
    if values.dtype not in (torch.int8, torch.int32) or values.dim() != 2 or not values.is_contiguous():
        raise ValueError(f"values: {values.dtype} {tuple(values.shape)}, expected contiguous int8 of two dimensions")
    out_features, in_features = values.shape[0], values.shape[1] * values.itemsize
    require_shape("scales", scales, (out_features,))
    if scales.dtype != torch.float32:
        raise ValueError(f"scales: dtype {scales.dtype}, expected float32")
    if bias is not None:
        require_shape("bias", bias, (out_features,))
    rows = x.values if isinstance(x, Int8Rows) else x
    require_shape("x", rows, (rows.shape[0], in_features))
    require_unit_stride("x", rows)
    if isinstance(x, Int8Rows):
        require_shape("x.scales", x.scales, (x.num_tokens,))
        if x.values.dtype != torch.int8:
            raise ValueError(f"x.values: dtype {x.values.dtype}, expected int8")
    else:
        require_float("x", x)
    if gated and out_features % 2:
        raise ValueError(f"values: {out_features} rows, gated products need pairs")
