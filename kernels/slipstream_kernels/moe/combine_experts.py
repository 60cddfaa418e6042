"""combine_experts, gate_experts: contract and choice.  What follows the products of a MoE layer's experts."""

from __future__ import annotations

import torch

from slipstream_kernels.routing import Routing
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select


def combine_experts(
    y: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Each token's sum of its rows of y times their weights, in fp32 and the order of its experts, in y's dtype.

    y: [num_rows, size].  bias: [num_experts, size] of y's dtype, finite, added to the rows of each expert (of a local
    routing: rows of other ranks' experts have weight 0).
    shared: [num_tokens, size] of y's dtype, contiguous: added last, times the sigmoid of shared_gate, [num_tokens, 1]
    of y's dtype and contiguous, where there is one.
    Returns [num_tokens, size].
    """
    require_float("y", y)
    require_shape("y", y, (routing.num_rows, y.shape[-1]))
    require_unit_stride("y", y)
    _require_expert_bias(bias, routing, y)
    if shared is None and shared_gate is not None:
        raise ValueError("shared_gate: given without shared")
    for name, tensor, columns in (("shared", shared, y.shape[1]), ("shared_gate", shared_gate, 1)):
        if tensor is not None:
            require_shape(name, tensor, (routing.weights.shape[0], columns))
            _require_contiguous(name, tensor, y.dtype)
    return select("moe.combine_experts", backend, y).combine_experts(y, routing, bias, shared, shared_gate)


def gate_experts(
    y: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    alpha: float,
    limit: float,
    backend: str = "auto",
) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of rows [gate, up], with gate at most limit and up within it, in fp32.

    y: [num_rows, 2 * size].  bias: [num_experts, 2 * size] of y's dtype, added to the rows of each expert before.
    Returns [num_rows, size] of y's dtype.  Source: gpt-oss, arXiv:2508.10925.
    """
    require_float("y", y)
    require_shape("y", y, (routing.num_rows, y.shape[-1]))
    require_unit_stride("y", y)
    if y.shape[1] % 2:
        raise ValueError(f"y: {y.shape[1]} columns, expected pairs of gate and up")
    _require_expert_bias(bias, routing, y)
    return select("moe.combine_experts", backend, y).gate_experts(y, routing, bias, alpha, limit)


def _require_expert_bias(bias: torch.Tensor | None, routing: Routing, y: torch.Tensor) -> None:
    if bias is None:
        return
    require_shape("bias", bias, (routing.num_experts, y.shape[1]))
    _require_contiguous("bias", bias, y.dtype)


def _require_contiguous(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous and {dtype}, is {tensor.dtype}")
