"""combine_experts and gate_experts in plain torch."""

from __future__ import annotations

import torch

from slipstream_kernels.routing import Routing


def combine_experts(
    y: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.combine_experts."""
    chosen = y[routing.rows.long()].float()
    if bias is not None:
        chosen = chosen + bias[_experts(routing)[routing.rows.long()]].float()
    total = (chosen * routing.weights[..., None]).sum(dim=1)
    if shared is not None:
        total += shared.float() if shared_gate is None else shared_gate.float().sigmoid() * shared.float()
    return total.to(y.dtype)


def gate_experts(
    y: torch.Tensor, routing: Routing, bias: torch.Tensor | None, alpha: float, limit: float
) -> torch.Tensor:
    """See ops.gate_experts."""
    rows = y.float() if bias is None else y.float() + bias[_experts(routing)].float()
    gate, up = rows.chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(y.dtype)


def _experts(routing: Routing) -> torch.Tensor:
    """The expert of each row; rows behind those of the last are taken for its."""
    rows = torch.arange(routing.num_rows, dtype=torch.int32, device=routing.offsets.device)
    return torch.searchsorted(routing.offsets[1:], rows, right=True).clamp(max=routing.num_experts - 1)
