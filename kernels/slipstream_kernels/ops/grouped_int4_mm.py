"""grouped_int4_mm: contract and choice.  Rows sorted by expert times each expert's own 4-bit weight."""

from __future__ import annotations

import logging

import torch

from slipstream_kernels import int4_layout
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.ops.grouped_mm import check_rows, grouped_mm
from slipstream_kernels.ops.int4_mm import check_int4, triton_refusal
from slipstream_kernels.ops.select import load_module, select
from slipstream_kernels.routing import Routing

LOG = logging.getLogger(__name__)
MAX_PLAIN_TOKENS = 16
FP8_ROWS = 128  # of an average expert, from which on FP8 products pay back what writing the weights out takes


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
    x, by_token, gated: as ops.grouped_mm.
    Accuracy: as ops.int4_mm; codes of a repacked weight are multiplied as they are, zero points and scales are applied
    to the sums of a group in fp32.  Except: from 128 FP8 rows an expert on, on average, (code - zero) * scale is e4m3.
    backend: "cuda" is what a repacked weight is multiplied by.
    """
    rows = x.values if isinstance(x, Fp8Rows) else x
    check_rows(x, weight.in_features, routing, by_token)
    if not weight.is_repacked:
        check_int4(weight)
    unit = routing.num_experts * (2 if gated else 1)
    if weight.out_features % unit:
        raise ValueError(f"weight: {weight.out_features} output features, expected a multiple of {unit}")
    if weight.is_repacked and backend == "auto" and _prefers_fp8(x, routing):
        values = load_module("triton", "expert_weights").expert_weights(weight)
        assert weight.zeros is not None
        stacked, scales = (tensor.unflatten(0, (routing.num_experts, -1)) for tensor in (values, weight.zeros))
        return grouped_mm(x, stacked, routing, scales, by_token=by_token, gated=gated)
    if weight.is_repacked and backend in ("auto", "cuda"):
        return load_module("cuda", "int4_experts").grouped_int4_mm(x, weight, routing, by_token, gated)
    if weight.is_repacked or backend == "cuda":
        wanted = "a weight of repack_expert_int4" if backend == "cuda" else "a canonical weight"
        raise ValueError(f"backend: {backend!r} takes {wanted}")
    module = select("grouped_int4_mm", backend, rows, triton_refusal(weight))
    return module.grouped_int4_mm(x, weight, routing, by_token, gated)


def _prefers_fp8(x: torch.Tensor | Fp8Rows, routing: Routing) -> bool:
    """Whether to write the weights out as e4m3 is paid back: bound by arithmetic, FP8 products are twice as fast."""
    many = routing.num_rows >= FP8_ROWS * routing.num_experts
    return isinstance(x, Fp8Rows) and x.dtype == torch.bfloat16 and many


def max_plain_expert_tokens(weight: Int4Weight) -> int:
    """Up to how many tokens 16-bit rows are multiplied as fast as FP8 rows, which then need not be made; 0: never."""
    return MAX_PLAIN_TOKENS if weight.is_repacked else 0


def repack_expert_int4(weight: Int4Weight, num_experts: int) -> Int4Weight:
    """The weight of all experts in the layout of its device's kernel, made once at load.

    A shape or device that the kernel does not serve stays canonical.  Raises ValueError for a weight that is not.
    """
    check_int4(weight)
    if not weight.packed.is_cuda:
        return weight
    reason = load_module("cuda", "int4_experts").refusal(weight, num_experts)
    if reason is not None:
        LOG.info("weight of %d experts stays canonical: %s", num_experts, reason)
        return weight
    return int4_layout.repack_experts(weight)
