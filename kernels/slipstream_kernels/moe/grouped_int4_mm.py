"""grouped_int4_mm: contract.  Rows sorted by expert times each expert's own 4-bit weight."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.int4_checks import check_int4, group_refusal, warn_of_canonical
from slipstream_kernels.gemm.linear_weight import format_of, int4_linear_weight
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe import grouped_mxfp4_layout, grouped_w4a8_layout
from slipstream_kernels.moe.grouped_linear import grouped_linear
from slipstream_kernels.moe.grouped_mm import check_rows
from slipstream_kernels.routing import Routing
from slipstream_kernels.select import load_module, select


def grouped_int4_mm(
    x: torch.Tensor | Fp8Rows,
    weight: Int4Weight,
    routing: Routing,
    *,
    by_token: bool = False,
    gated: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """y[r] = x[r] @ dequantised(weight of row r's expert).T as [num_rows, out_features of an expert].

    weight: of all experts, one below the other: [num_experts * out_features, in_features]; canonical, or as
    repack_expert_int4 made it for x's device.
    x, by_token, gated: as ops.grouped_mm.  Beside a weight that is repacked for FP8 rows, the kernel
    quantises 16-bit rows as ops.quantize_fp8 does.
    Accuracy: as ops.int4_mm; 4-bit values of a repacked weight are multiplied exactly, zero points and scales are
    applied to the sums of a group in fp32 (MXFP4 times its scale is exact in bf16).  Except: from an average of 128 FP8
    rows an expert on (512 if the weight is repacked for FP8 rows), (q - zero point) * scale is rounded to e4m3; from
    12 16-bit rows on (96 if the weight is canonical) to their type.
    backend: "cuda" is what a repacked weight is multiplied by.
    """
    rows = x.values if isinstance(x, Fp8Rows) else x
    check_rows(x, weight.in_features, routing, by_token)
    if not weight.is_repacked:
        check_int4(weight)
    unit = routing.num_experts * (2 if gated else 1)
    if weight.out_features % unit:
        raise ValueError(f"weight: {weight.out_features} output features, expected a multiple of {unit}")
    if backend == "auto":
        fp8_rows = isinstance(x, Fp8Rows) or weight.is_grouped_w4a8
        held = int4_linear_weight(weight, fp8_rows=fp8_rows, num_experts=routing.num_experts)
        return grouped_linear(x, held, routing, by_token=by_token, gated=gated)
    if weight.is_repacked and backend == "cuda":
        module = load_module("cuda", f"moe.{format_of(weight, routing.num_experts)}_gemm")
    elif weight.is_repacked or backend == "cuda":
        wanted = "a weight of repack_expert_int4" if backend == "cuda" else "a canonical weight"
        raise ValueError(f"backend: {backend!r} takes {wanted}")
    else:
        refusal = group_refusal(weight.group_size, weight.in_features)
        module = select("moe.grouped_int4_mm", backend, rows, refusal)
    y: torch.Tensor = module.grouped_int4_mm(x, weight, routing, by_token, gated)
    return y


def repack_expert_int4(weight: Int4Weight, num_experts: int, *, fp8_rows: bool = False) -> Int4Weight:
    """The weight of all experts in the layout of its device's kernel, made once at load.

    fp8_rows: it is multiplied by FP8 rows alone, which have a faster kernel for groups of 128 and whole rows.
    Repacked e2m1 weights are multiplied by bf16 rows alone.  A shape or device that the kernel does not serve stays
    canonical, with a warning.  Raises ValueError for a weight that is not canonical.
    """
    check_int4(weight)
    if not weight.packed.is_cuda:
        return weight
    form, reason = expert_form(weight, num_experts, fp8_rows=fp8_rows)
    if reason is not None:
        size = f"{num_experts} experts, {weight.out_features // num_experts} x {weight.in_features} each,"
        warn_of_canonical(size, reason)
        return weight
    if form == "grouped_w4a8":
        return grouped_w4a8_layout.repack_experts(weight, num_experts)
    if form == "grouped_mxfp4":
        return grouped_mxfp4_layout.repack_experts(weight, num_experts)
    return int4_layout.repack_experts(weight)


def expert_form(weight: Int4Weight, num_experts: int, *, fp8_rows: bool = False) -> tuple[str, str | None]:
    """The form that repack_expert_int4 gives a canonical weight on a GPU, and why it is the canonical one, if it is.

    The weight's tensors may be empty, as long as they are on the device.
    """
    for_fp8 = fp8_rows and not weight.is_e2m1
    if for_fp8 and load_module("cuda", "moe.grouped_w4a8_gemm").refusal(weight, num_experts) is None:
        return "grouped_w4a8", None
    form = "grouped_mxfp4" if weight.is_e2m1 else "grouped_w4a16"
    reason = load_module("cuda", f"moe.{form}_gemm").refusal(weight, num_experts)
    return (form, None) if reason is None else (format_of(weight), reason)
