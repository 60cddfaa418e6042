"""repack_int4, activation_sum_columns: contract.  4-bit weights in the order of a device's kernels."""

from __future__ import annotations

from types import ModuleType

import torch

from slipstream_kernels.gemm import int4_layout, w4a8_layout
from slipstream_kernels.gemm.cpu import int4_packed
from slipstream_kernels.gemm.int4_checks import check_int4, warn_of_canonical
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.select import load_module


def activation_sum_columns(weight: Int4Weight) -> int:
    """How many columns share an activation sum in FP8 rows for the weight (Fp8Scheme.sum_columns); 0: no sums.

    weight: canonical, or repacked for FP8 rows.
    """
    is_served = weight.is_for_fp8_rows or (weight.packed.is_cuda and _cuda("w4a8_mm").refusal(weight) is None)
    return w4a8_layout.sum_columns(weight.group_size) if is_served else 0


def repack_int4(weight: Int4Weight, *, for_fp8_rows: bool = False, dtype: torch.dtype | None = None) -> Int4Weight:
    """The weight in the layout of its device's kernels, made once at load; canonical where those take it as it is.

    for_fp8_rows: it will be multiplied by those alone; else by 16-bit rows alone.
    dtype: of the rows, None for any; a CPU has a layout for bf16 rows.
    A shape that the device's kernels do not serve stays canonical, with a warning, and so do e2m1 weights.  Raises
    ValueError for a weight that is not canonical.
    """
    check_int4(weight)
    if weight.packed.device.type == "cpu" and not weight.is_e2m1:
        is_served = not for_fp8_rows and dtype == torch.bfloat16 and int4_packed.refusal(weight) is None
        return int4_packed.repack(weight) if is_served else weight
    if not weight.packed.is_cuda or weight.is_e2m1:
        return weight
    reason = _cuda("w4a8_mm" if for_fp8_rows else "int4_mm").refusal(weight)
    if reason is not None:
        warn_of_canonical(f"{weight.out_features} x {weight.in_features}", reason)
        return weight
    return w4a8_layout.repack(weight) if for_fp8_rows else int4_layout.repack(weight)


def _cuda(name: str) -> ModuleType:
    return load_module("cuda", f"gemm.{name}")
