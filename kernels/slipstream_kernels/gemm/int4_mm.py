"""int4_mm, repack_int4: contract and choice.  16-bit or FP8 rows times 4-bit weights scaled by groups."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.gemm import int4_layout, w4a8_layout
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.norm.silu_mul import silu_mul
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select

LOG = logging.getLogger(__name__)
TRITON_BLOCK = 128  # input features that gemm/triton/int4_mm.py takes at a time


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
    Codes less zero-points are exact in every type of product; group scales are applied to sums in fp32, or to weights
    in x's dtype.  FP8 sums leave the tensor core for fp32 at least every 128 input features.  Except: more than 64 FP8
    rows (128 of few output features) and a repacked weight, whose (code - zero) * scale is rounded to e4m3 (2 to 3 % of
    a result's norm).
    backend: "cuda" is what a repacked weight of a GPU is multiplied by.
    """
    rows = x.values if isinstance(x, Fp8Rows) else x
    _check_rows(x, weight.in_features)
    if bias is not None:
        require_shape("bias", bias, (weight.out_features,))
    if not weight.is_repacked:
        check_int4(weight)
    if weight.is_for_fp8_rows:
        y = _multiply_fp8(x, weight, bias, backend)
        return silu_mul(y) if gated else y
    module = _choose(backend, x, weight)
    if gated and weight.out_features % 2:
        raise ValueError(f"weight: {weight.out_features} output features, gated products need pairs")
    is_candidate = gated and weight.is_repacked and not isinstance(x, Fp8Rows)
    if is_candidate and module.can_gate(rows.shape[0], weight):
        return module.int4_mm_gated(x, weight, bias)
    y = module.int4_mm(x, weight, bias)
    return silu_mul(y) if gated else y


def int4_total_columns(weight: Int4Weight) -> int:
    """Of what runs of columns FP8 rows are to have sums (Fp8Scheme.total_columns) for its products; 0: of none.

    weight: canonical, or repacked for FP8 rows.
    """
    is_served = weight.is_for_fp8_rows or (weight.packed.is_cuda and _cuda("w4a8_mm").refusal(weight) is None)
    return w4a8_layout.total_columns(weight.group_size) if is_served else 0


def repack_int4(weight: Int4Weight, *, for_fp8_rows: bool = False) -> Int4Weight:
    """The weight in the layout of its device's kernels, made once at load; canonical where those take it as it is.

    for_fp8_rows: it will be multiplied by those alone; else by 16-bit rows alone.
    A shape that the device's kernels do not serve stays canonical.  Raises ValueError for a weight that is not.
    """
    check_int4(weight)
    if not weight.packed.is_cuda:
        return weight
    reason = _cuda("w4a8_mm" if for_fp8_rows else "int4_mm").refusal(weight)
    if reason is not None:
        LOG.info("weight of %d x %d stays canonical: %s", weight.out_features, weight.in_features, reason)
        return weight
    return w4a8_layout.repack(weight) if for_fp8_rows else int4_layout.repack(weight)


def _multiply_fp8(
    x: torch.Tensor | Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None, backend: str
) -> torch.Tensor:
    if not isinstance(x, Fp8Rows) or backend not in ("auto", "cuda"):
        raise ValueError('weight: repacked for FP8 rows, takes those alone, and backend "auto" or "cuda"')
    y: torch.Tensor = _cuda("w4a8_mm").w4a8_mm(x, weight, bias)
    return y


def _choose(backend: str, x: torch.Tensor | Fp8Rows, weight: Int4Weight) -> ModuleType:
    rows = x.values if isinstance(x, Fp8Rows) else x
    if weight.is_repacked and isinstance(x, Fp8Rows):
        raise ValueError("weight: repacked for 16-bit rows, takes those alone")
    if weight.is_repacked and backend in ("auto", "cuda"):
        return _cuda("int4_mm")
    if weight.is_repacked or backend == "cuda":
        wanted = "a weight of repack_int4" if backend == "cuda" else "a canonical weight"
        raise ValueError(f"backend: {backend!r} takes {wanted}")
    return select("gemm.int4_mm", backend, rows, triton_refusal(weight))


def _cuda(name: str) -> ModuleType:
    return importlib.import_module(f"slipstream_kernels.gemm.cuda.{name}")


def check_int4(weight: Int4Weight) -> None:
    """Raise ValueError unless the weight is canonical and its tensors fit its sizes."""
    out_features, in_features, group_size = weight.out_features, weight.in_features, weight.group_size
    if in_features % 2 or group_size < 1 or in_features % group_size:
        raise ValueError(f"group_size: {group_size} does not divide an even number of input features: {in_features}")
    if weight.packed.dtype != torch.uint8:
        raise ValueError(f"packed: dtype {weight.packed.dtype}, expected uint8")
    require_shape("packed", weight.packed, (out_features, in_features // 2))
    require_shape("scales", weight.scales, (out_features, in_features // group_size))
    if weight.scales.dtype != torch.float32:
        raise ValueError(f"scales: dtype {weight.scales.dtype}, expected float32")
    if weight.zeros is not None:
        require_shape("zeros", weight.zeros, tuple(weight.scales.shape))
        if weight.zeros.dtype != torch.uint8:
            raise ValueError(f"zeros: dtype {weight.zeros.dtype}, expected uint8")


def triton_refusal(weight: Int4Weight) -> str | None:
    """Why the Triton-lang version cannot take the weight; None if it can."""
    size = weight.group_size
    if size % TRITON_BLOCK and size not in (32, 64, weight.in_features):
        return f"group_size {size} is neither 32, 64, a multiple of {TRITON_BLOCK} nor the whole row"
    return "the weight is packed for another kernel" if weight.is_repacked else None


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
