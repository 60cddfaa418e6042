"""combine_experts and gate_experts in Triton-lang."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.routing import Routing
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents

COMBINE_BLOCK = 1024


@triton.jit
def _expert_of(offsets_ptr, row, NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """How many experts' rows end at or before this one; rows behind those of the last are taken for its."""
    experts = tl.arange(0, EXPERTS_PADDED)
    ends = tl.load(offsets_ptr + 1 + experts, mask=experts < NUM_EXPERTS, other=2147483647)
    return tl.minimum(tl.sum((ends <= row).to(tl.int32), axis=0), NUM_EXPERTS - 1)


@triton.jit
def _combine_experts_kernel(
    y_ptr,
    rows_ptr,
    weights_ptr,
    bias_ptr,
    offsets_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    y_row_stride,
    size,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + turn).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + turn)
        value = tl.load(y_ptr + row * y_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = _expert_of(offsets_ptr, row, NUM_EXPERTS, EXPERTS_PADDED)
            value += tl.load(bias_ptr + expert.to(tl.int64) * size + columns, mask=mask, other=0.0).to(tl.float32)
        total += weight * value
    if HAS_SHARED:
        value = tl.load(shared_ptr + token * size + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            value *= tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32))
        total += value
    tl.store(out_ptr + token * size + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_experts_kernel(
    y_ptr,
    bias_ptr,
    offsets_ptr,
    out_ptr,
    y_row_stride,
    size,
    alpha,
    limit,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, pieces of a row)."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(y_ptr + row * y_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(y_ptr + row * y_row_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        expert = _expert_of(offsets_ptr, row, NUM_EXPERTS, EXPERTS_PADDED)
        biases = bias_ptr + expert.to(tl.int64) * 2 * size + columns
        gate += tl.load(biases, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(biases + size, mask=mask, other=0.0).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit)
    gated = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    tl.store(out_ptr + row * size + columns, gated.to(out_ptr.dtype.element_ty), mask=mask)


def combine_experts(
    y: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.combine_experts."""
    num_tokens, top_k = routing.weights.shape
    out = torch.empty((num_tokens, y.shape[1]), dtype=y.dtype, device=y.device)
    if not num_tokens:
        return out
    _combine_experts_kernel[(num_tokens, triton.cdiv(y.shape[1], COMBINE_BLOCK))](
        y,
        routing.rows,
        routing.weights,
        bias,
        routing.offsets,
        shared,
        shared_gate,
        out,
        y.stride(0),
        y.shape[1],
        TOP_K=top_k,
        HAS_SHARED=shared is not None,
        HAS_GATE=shared_gate is not None,
        BLOCK=COMBINE_BLOCK,
        **_bias_constants(routing, bias),
        **dependent_launch(y.device),
    )
    return out


def gate_experts(
    y: torch.Tensor, routing: Routing, bias: torch.Tensor | None, alpha: float, limit: float
) -> torch.Tensor:
    """See ops.gate_experts."""
    num_rows, size = routing.num_rows, y.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=y.dtype, device=y.device)
    if not num_rows:
        return out
    _gate_experts_kernel[(num_rows, triton.cdiv(size, COMBINE_BLOCK))](
        y,
        bias,
        routing.offsets,
        out,
        y.stride(0),
        size,
        alpha,
        limit,
        BLOCK=COMBINE_BLOCK,
        **_bias_constants(routing, bias),
        **dependent_launch(y.device),
    )
    return out


def _bias_constants(routing: Routing, bias: torch.Tensor | None) -> dict[str, int | bool]:
    """Without a bias no expert of a row is looked for, and one kernel serves any number of them."""
    if bias is None:
        return {"NUM_EXPERTS": 1, "EXPERTS_PADDED": 1, "HAS_BIAS": False}
    padded = triton.next_power_of_2(routing.num_experts)
    return {"NUM_EXPERTS": routing.num_experts, "EXPERTS_PADDED": padded, "HAS_BIAS": True}
