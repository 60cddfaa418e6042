"""grouped_mm: contract.  Rows sorted by expert times each expert's own weight: 16 bits, FP8 or int8."""

from __future__ import annotations

import torch

from slipstream_kernels.fp8 import BLOCK, E4M3, Fp8Rows
from slipstream_kernels.gemm.linear_weight import LinearWeight
from slipstream_kernels.gemm.product import FP8_ROWS, INT8_ROWS, PLAIN_ROWS, WeightKind
from slipstream_kernels.integer import Int8Rows
from slipstream_kernels.moe.grouped_linear import grouped_linear
from slipstream_kernels.routing import Routing
from slipstream_kernels.select import load_module, require_float, require_shape, require_unit_stride, select

GroupedRows = torch.Tensor | Fp8Rows | Int8Rows


def grouped_mm(
    x: GroupedRows,
    weight: torch.Tensor,
    routing: Routing,
    scales: torch.Tensor | None = None,
    *,
    by_token: bool = False,
    gated: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """y[r] = x[r] @ dequantised(weight[expert of row r]).T as [num_rows, out_features], accumulated in fp32.

    by_token: x has a row for each token, taken by all its pairs; else one for each row of the routing.
    gated: returns silu(y[:, :half]) * y[:, half:].
    x: fp32, bf16 or fp16, last dimension contiguous, or rows of e4m3 or int8 with scales; y has its dtype.
    weight: [num_experts, out_features, in_features], contiguous.  It has x's dtype, or scales in fp32: e4m3 and int8
    those of output features, [num_experts, out_features], beside plain rows or ones of its own type scaled per row;
    e4m3 those of blocks, [num_experts, *block_scales of one], beside e4m3 rows scaled per 128 columns.  Gated, gate and
    up are whole blocks.  FP8 sums leave the tensor core for fp32 every 128 input features; those of int8 are exact.
    backend: "library" is torch's grouped product of bf16, or of e4m3 with a scale a row and output feature, beside the
    usual three.
    """
    num_experts, out_features, in_features = weight.shape
    check_rows(x, in_features, routing, by_token, is_grouped=scales is not None and scales.dim() == 3)
    if num_experts != routing.num_experts or not weight.is_contiguous():
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected contiguous of {routing.num_experts} experts")
    if gated and out_features % 2:
        raise ValueError(f"weight: {out_features} output features, gated products need pairs")
    rows = x if isinstance(x, torch.Tensor) else x.values
    if weight.dtype in (E4M3, torch.int8):
        if rows is not x and rows.dtype != weight.dtype:
            raise ValueError(f"weight: dtype {weight.dtype} beside rows of {rows.dtype}")
        _check_scales(weight, scales, is_plain=rows is x, gated=gated)
    elif rows is not x or weight.dtype != x.dtype or scales is not None:
        raise ValueError(f"weight: dtype {weight.dtype}, expected {E4M3} or int8 with scales, or that of x")
    if backend == "auto" and not (rows is x and weight.dtype == E4M3):
        return grouped_linear(x, _weight_of(x, weight, scales), routing, by_token=by_token, gated=gated)
    is_library = backend == "library"
    module = load_module("library", "moe.grouped_mm") if is_library else select("moe.grouped_mm", backend, rows)
    y: torch.Tensor = module.grouped_mm(x, weight, routing, scales, by_token, gated)
    return y


def _weight_of(x: GroupedRows, weight: torch.Tensor, scales: torch.Tensor | None) -> LinearWeight:
    """The weight as ops.grouped_linear takes it, for rows in the form of x."""
    by_blocks = scales is not None and scales.dim() == 3
    name = {E4M3: "fp8_block" if by_blocks else "fp8", torch.int8: "int8"}.get(weight.dtype, "plain")
    form = FP8_ROWS if isinstance(x, Fp8Rows) else INT8_ROWS if isinstance(x, Int8Rows) else PLAIN_ROWS
    num_experts, out_features, in_features = weight.shape
    kind = WeightKind(name, out_features, in_features, weight.dtype, weight.device, 0, form, num_experts)
    return LinearWeight(kind, weight, scales)


def _check_scales(weight: torch.Tensor, scales: torch.Tensor | None, *, is_plain: bool, gated: bool) -> None:
    num_experts, out_features, in_features = weight.shape
    if scales is None or scales.dtype != torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales: a weight of {weight.dtype} needs contiguous fp32 scales")
    if scales.dim() != 3:
        require_shape("scales", scales, (num_experts, out_features))
        return
    if weight.dtype != E4M3 or is_plain:
        raise ValueError(f"scales: those of blocks are for weights and rows of {E4M3}")
    part = out_features // 2 if gated else out_features
    if in_features % BLOCK or (gated and part % BLOCK):
        raise ValueError(f"weight: {part} x {in_features} features, scales of blocks need multiples of {BLOCK}")
    columns = in_features // BLOCK
    require_shape("scales", scales, (num_experts, -(-out_features // BLOCK), columns + -columns % 4))


def check_rows(x: GroupedRows, in_features: int, routing: Routing, by_token: bool, *, is_grouped: bool = False) -> None:
    """Raise ValueError unless x has the rows that a grouped product with this routing takes.

    is_grouped: e4m3 rows are scaled per 128 columns.
    """
    num_rows = routing.num_tokens if by_token else routing.num_rows
    if isinstance(x, Fp8Rows):
        if x.num_tokens != num_rows:
            raise ValueError(f"x: {x.num_tokens} rows, expected {num_rows}")
        allocated = x.values.shape[0]
        require_shape("x.values", x.values, (allocated, in_features))
        require_shape("x.scales", x.scales, (allocated, in_features // BLOCK if is_grouped else 1))
        return
    if isinstance(x, Int8Rows):
        require_shape("x.values", x.values, (num_rows, in_features))
        require_shape("x.scales", x.scales, (num_rows,))
        return
    require_float("x", x)
    require_shape("x", x, (num_rows, in_features))
    require_unit_stride("x", x)
