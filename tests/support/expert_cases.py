"""Operands of experts' products, their exact values, and tolerances."""

from __future__ import annotations

import torch
from slipstream_kernels import ops
from slipstream_kernels.ops import Fp8Rows, Int4Weight, Int8Rows, Routing


def logits_of(num_tokens: int, num_experts: int, device, dtype=torch.float32) -> torch.Tensor:
    """Router logits with which the last expert is never chosen."""
    logits = 2 * torch.randn(num_tokens, num_experts, device=device)
    logits[:, -1] = -40
    return logits.to(dtype)


def rows_of(
    kind: str, num_rows: int, size: int, dtype: torch.dtype, device
) -> tuple[torch.Tensor | Fp8Rows | Int8Rows, torch.Tensor]:
    """(operand, its exact value in fp64)"""
    x = torch.randn(num_rows, size, device=device).to(dtype)
    if kind == "int8":
        integers = ops.quantize_int8(x)
        return integers, integers.values.double() * integers.scales.double()[:, None]
    if kind not in ("fp8", "fp8 blocks"):
        return x, x.double()
    rows = ops.quantize_fp8(x, ops.Fp8Scheme(128 if kind == "fp8 blocks" else 0))
    wide = rows.values[:num_rows].double().unflatten(1, (rows.scales.shape[1], -1))
    return rows, (wide * rows.scales[:num_rows, :, None].double()).flatten(1)


def check(y, exact_x, exact_w, routing: Routing, by_token: bool, gated: bool, tolerance) -> None:
    """exact_w: [experts, out, in] in fp64."""
    rows = exact_x[routing.tokens.long()] if by_token else exact_x
    experts = torch.bucketize(torch.arange(routing.num_rows, device=rows.device), routing.offsets[1:], right=True)
    expected = torch.einsum("rk,rnk->rn", rows, exact_w[experts])
    spread = torch.einsum("rk,rnk->rn", rows.square(), exact_w[experts].square()).sqrt()
    rtol, atol = tolerance
    limit = rtol * expected.abs() + atol * spread
    if gated:
        (gate, up), (gate_limit, up_limit) = expected.chunk(2, -1), limit.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        limit = (
            1.2 * (gate_limit * up.abs() + up_limit * gate.abs()) + gate_limit * up_limit + 2 * rtol * expected.abs()
        )
    assert ((y.double() - expected).abs() <= limit).all()


def int4_of(rows: int, in_features: int, group_size: int, has_zeros: bool, device) -> Int4Weight:
    groups = (rows, in_features // group_size)
    packed = torch.randint(256, (rows, in_features // 2), dtype=torch.uint8, device=device)
    scales = (0.5 + torch.rand(groups, device=device)) * in_features**-0.5 / 4
    zeros = torch.randint(17, groups, dtype=torch.uint8, device=device) if has_zeros else None
    return ops.int4_weight(packed, scales, zeros, group_size, in_features)
