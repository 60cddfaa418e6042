"""Packs the tensors of a quantised linear for each format, from weights already rounded to their grid."""

from __future__ import annotations

import torch
from slipstream_kernels import ops
from torch import Tensor

from quantization.grids import Fp8Grid, Grid, Int4Grid, Int8Grid

GPTQ_V1_ONES = 0x11111111  # version 1 of the format stores zero-points less one
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that the n-th nibble of a word holds


def stored_tensors(weight: Tensor, grid: Grid, layout: str, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Suffix -> tensor. weight: [out, in] fp32 on the grid. layout: awq, gptq or a format of compressed-tensors."""
    columns = torch.arange(weight.shape[1], device=weight.device)
    if isinstance(grid, Int4Grid):
        codes, zeros = grid.codes(columns, weight).to(torch.uint8), grid.zeros.to(torch.uint8)
        scales = grid.scales.to(scale_dtype)
        if layout == "awq":
            return _awq(codes, zeros, scales)
        if layout == "gptq":
            return _gptq(codes, zeros, scales, grid.group_size)
        return _packed_int4(codes, zeros if grid.has_zeros else None, scales)
    if isinstance(grid, Int8Grid):
        values, scales = grid.codes(weight).to(torch.int8), grid.scales.to(scale_dtype)
        if layout == "int-quantized":
            return {"weight": values, "weight_scale": scales}
        words = (values.view(torch.uint8) ^ 128).view(torch.int32)
        return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    assert isinstance(grid, Fp8Grid)
    scales = grid.scales[:: grid.height].to(scale_dtype)
    return {"weight": grid.codes(columns, weight), "weight_scale": scales}


def _words(codes: Tensor) -> Tensor:
    """uint8 codes [..., 8 n] -> int32 [..., n], the first in the lowest bits."""
    packed = ops.pack_int4(codes.contiguous())
    return packed.flatten().view(torch.int32).view(*packed.shape[:-1], -1)  # one row has a stride that no view takes


def _packed_int4(codes: Tensor, zeros: Tensor | None, scales: Tensor) -> dict[str, Tensor]:
    tensors = {"weight_packed": _words(codes), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    if zeros is not None:
        tensors["weight_zero_point"] = _words(zeros.t()).t()
    return tensors


def _awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    def words(rows: Tensor) -> Tensor:
        return _words(rows.t().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1))

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.t()}


def _gptq(codes: Tensor, zeros: Tensor, scales: Tensor, group_size: int) -> dict[str, Tensor]:
    return {
        "qweight": _words(codes).t(),
        "qzeros": _words(zeros.t()) - GPTQ_V1_ONES,
        "scales": scales.t(),
        "g_idx": (torch.arange(codes.shape[1], device=codes.device) // group_size).int(),
    }
