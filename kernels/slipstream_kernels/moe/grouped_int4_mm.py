"""grouped_int4_mm: contract and choice.  Rows sorted by expert times each expert's own 4-bit weight."""

from __future__ import annotations

import logging
import sys

import torch

from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.int4_mm import check_int4, triton_refusal
from slipstream_kernels.gemm.quantize_fp8 import quantize_fp8
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe import expert_records
from slipstream_kernels.moe.grouped_mm import check_rows, grouped_mm
from slipstream_kernels.routing import Routing
from slipstream_kernels.select import load_module, select

LOG = logging.getLogger(__name__)
MAX_PLAIN_TOKENS = 16
# rows of an average expert, from which on FP8 products pay back what writing the weights out takes; of records
FP8_ROWS, FP8_ROWS_OF_RECORDS = 128, 512


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
    x, by_token, gated: as ops.grouped_mm.  Beside records (repack_expert_int4, fp8_rows) 16-bit rows are quantised on
    their way, as ops.quantize_fp8 does.
    Accuracy: as ops.int4_mm; codes of a repacked weight are multiplied as they are, zero points and scales are applied
    to the sums of a group in fp32.  Except: from 128 FP8 rows an expert on, on average, (code - zero) * scale is e4m3,
    of a weight stored as records from 512 on.
    backend: "cuda" is what a repacked weight is multiplied by.
    """
    rows = x.values if isinstance(x, Fp8Rows) else x
    check_rows(x, weight.in_features, routing, by_token)
    if not weight.is_repacked:
        check_int4(weight)
    unit = routing.num_experts * (2 if gated else 1)
    if weight.out_features % unit:
        raise ValueError(f"weight: {weight.out_features} output features, expected a multiple of {unit}")
    if weight.is_repacked and backend == "auto" and _prefers_fp8(x, weight, routing):
        quantised = x if isinstance(x, Fp8Rows) else quantize_fp8(x)
        values, scales = (tensor.unflatten(0, (routing.num_experts, -1)) for tensor in _written_out(weight, routing))
        return grouped_mm(quantised, values, routing, scales, by_token=by_token, gated=gated)
    if weight.has_records and backend in ("auto", "cuda"):
        return load_module("cuda", "moe.record_experts").grouped_int4_mm(x, weight, routing, by_token, gated)
    if weight.is_repacked and backend in ("auto", "cuda"):
        return load_module("cuda", "moe.int4_experts").grouped_int4_mm(x, weight, routing, by_token, gated)
    if weight.is_repacked or backend == "cuda":
        wanted = "a weight of repack_expert_int4" if backend == "cuda" else "a canonical weight"
        raise ValueError(f"backend: {backend!r} takes {wanted}")
    module = select("moe.grouped_int4_mm", backend, rows, triton_refusal(weight))
    return module.grouped_int4_mm(x, weight, routing, by_token, gated)


def _prefers_fp8(x: torch.Tensor | Fp8Rows, weight: Int4Weight, routing: Routing) -> bool:
    """Whether to write the weights out as e4m3 is paid back: bound by arithmetic, FP8 products are twice as fast."""
    least = FP8_ROWS_OF_RECORDS if weight.has_records else FP8_ROWS
    is_fp8 = isinstance(x, Fp8Rows) or weight.has_records
    return is_fp8 and x.dtype == torch.bfloat16 and routing.num_rows >= least * routing.num_experts


def _written_out(weight: Int4Weight, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [out_features of all experts, in_features], scales of its rows)"""
    if weight.has_records:
        values = load_module("triton", "moe.record_weights").record_weights(weight, routing.num_experts)
        return values, weight.scales
    assert weight.zeros is not None
    return load_module("triton", "moe.expert_weights").expert_weights(weight), weight.zeros


def max_plain_expert_tokens(weight: Int4Weight) -> int:
    """Up to how many tokens 16-bit rows are multiplied as fast as FP8 rows, which then need not be made; 0: never."""
    if weight.has_records:
        return sys.maxsize  # the kernel makes them
    return MAX_PLAIN_TOKENS if weight.is_repacked else 0


def repack_expert_int4(weight: Int4Weight, num_experts: int, *, fp8_rows: bool = False) -> Int4Weight:
    """The weight of all experts in the layout of its device's kernel, made once at load.

    fp8_rows: it is multiplied by FP8 rows alone, which have a faster kernel (records) for groups of 128 and whole rows.
    A shape or device that the kernel does not serve stays canonical.  Raises ValueError for a weight that is not.
    """
    check_int4(weight)
    if not weight.packed.is_cuda:
        return weight
    if fp8_rows and load_module("cuda", "moe.record_experts").refusal(weight, num_experts) is None:
        return expert_records.pack_experts(weight, num_experts)
    reason = load_module("cuda", "moe.int4_experts").refusal(weight, num_experts)
    if reason is not None:
        LOG.info("weight of %d experts stays canonical: %s", num_experts, reason)
        return weight
    return int4_layout.repack_experts(weight)
