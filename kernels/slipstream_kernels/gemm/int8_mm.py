"""int8_mm: contract and choice.  Float or int8 rows times int8 weights with one scale per output feature."""

from __future__ import annotations

import logging
from types import ModuleType

import torch

from slipstream_kernels.gemm import int8_layout
from slipstream_kernels.gemm.skinny_gemm import max_streamed_tokens, skinny_gemm
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.norm.silu_mul import silu_mul
from slipstream_kernels.select import load_module, require_float, require_shape, require_unit_stride, select

LOG = logging.getLogger(__name__)
MIN_CUDA_ROWS = 65  # below, the Triton-lang kernel is the faster (docs/measurements)


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
    "auto" gives few 16-bit rows on a Hopper GPU to ops.skinny_gemm.
    """
    _check(x, values, scales, bias, gated)
    if values.dtype == torch.int32:
        if isinstance(x, Int8Rows) or backend not in ("auto", "cuda"):
            raise ValueError('values: a weight of repack_int8 takes float rows, and backend "auto" or "cuda"')
        module = _cuda("int8_mm")
        fuses = gated and module.can_gate(x, values)
        y = module.int8_mm(x, values, scales, bias, fuses)
        return silu_mul(y) if gated and not fuses else y
    if not isinstance(x, Int8Rows) and backend == "auto" and _is_streamed(x, values, scales):
        return skinny_gemm(x, values, scales, None if bias is None else bias.to(x.dtype), gated=gated)
    if isinstance(x, Int8Rows) and _prefers_cuda(x, values, backend):
        y = _cuda("int8_gemm").int8_gemm(x, values, scales, bias)
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
    reason = _cuda("int8_mm").refusal(values)
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


def _is_streamed(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> bool:
    is_operand = x.dtype in (torch.bfloat16, torch.float16) and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return is_operand and x.shape[0] <= max_streamed_tokens(values, scales)


def _prefers_cuda(rows: Int8Rows, values: torch.Tensor, backend: str) -> bool:
    """Whether many int8 rows go to CUTLASS; raises ValueError where that is asked for and cannot be."""
    if backend == "cuda":
        if (reason := _cuda("int8_gemm").refusal(rows, values)) is not None:
            raise ValueError(f"backend: cuda cannot run int8_mm: {reason}")
        return True
    is_candidate = backend == "auto" and values.is_cuda and rows.num_tokens >= MIN_CUDA_ROWS
    return is_candidate and _cuda("int8_gemm").refusal(rows, values) is None


def _cuda(name: str) -> ModuleType:
    return load_module("cuda", f"gemm.{name}")
