"""Grids: the representable values of a quantised weight. Scales are chosen first, then weights are rounded.

A grid rounds some columns of a weight at a time, as GPTQ needs (gptq.py). Grids of weights of one shape can be stacked:
all their tensors then have a leading dimension, of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from slipstream_kernels import ops
from torch import Tensor

E4M3, E4M3_MAX, INT8_MAX, MAX_CODE, BLOCK = torch.float8_e4m3fn, 448.0, 127, 15, 128


class Grid(Protocol):
    def nearest(self, columns: Tensor, weight: Tensor) -> Tensor:
        """weight: [out, n] fp32, which are these columns [n] of the whole -> the nearest values on the grid.

        Of a stack weight is [stacked, out, n] and columns [stacked, n]."""
        ...


def stacked(grids: Sequence[Grid]) -> Grid:
    """The grids of weights of one shape as one, in their order."""
    first = grids[0]
    tensors = [name for name, value in vars(first).items() if isinstance(value, Tensor)]
    joined = {name: torch.stack([getattr(grid, name) for grid in grids]) for name in tensors}
    return replace(first, **joined)  # type: ignore[type-var]


def _at(of_groups: Tensor, groups: Tensor) -> Tensor:
    """of_groups: [..., out, groups]; groups: [n] of each column, of a stack [stacked, n]. Returns [..., out, n]."""
    if groups.dim() == 1:
        return of_groups[..., groups]
    return of_groups.gather(-1, groups[..., None, :].expand(*of_groups.shape[:-1], -1))


@dataclass(frozen=True)
class Int4Grid:
    """scales, zeros: [out, groups] fp32. has_zeros: False: all zeros are 8."""

    scales: Tensor
    zeros: Tensor
    group_size: int
    has_zeros: bool

    def codes(self, columns: Tensor, weight: Tensor) -> Tensor:
        """0..15, as fp32."""
        groups = columns // self.group_size
        return (weight / _at(self.scales, groups)).round_().add_(_at(self.zeros, groups)).clamp_(0, MAX_CODE)

    def nearest(self, columns: Tensor, weight: Tensor) -> Tensor:
        groups = columns // self.group_size
        return self.codes(columns, weight).sub_(_at(self.zeros, groups)).mul_(_at(self.scales, groups))


@dataclass(frozen=True)
class Int8Grid:
    """scales: [out, 1] fp32."""

    scales: Tensor

    def codes(self, weight: Tensor) -> Tensor:
        """-127..127, as fp32."""
        return (weight / self.scales).round_().clamp_(-INT8_MAX, INT8_MAX)

    def nearest(self, columns: Tensor, weight: Tensor) -> Tensor:
        return self.codes(weight).mul_(self.scales)


@dataclass(frozen=True)
class Fp8Grid:
    """scales: [out, in / width] fp32, of `width` columns and `height` rows each (repeated for each of those rows)."""

    scales: Tensor
    width: int
    height: int = 1

    def codes(self, columns: Tensor, weight: Tensor) -> Tensor:
        """e4m3."""
        return (weight / _at(self.scales, columns // self.width)).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)

    def nearest(self, columns: Tensor, weight: Tensor) -> Tensor:
        return self.codes(columns, weight).float().mul_(_at(self.scales, columns // self.width))


def int4_grid(
    weight: Tensor, group_size: int, has_zeros: bool, importance: Tensor | None, scale_dtype: torch.dtype
) -> Int4Grid:
    """group_size 0: one group a row. Scales are rounded to scale_dtype."""
    found = ops.quantize_int4(weight, group_size, has_zeros=has_zeros, importance=importance)
    zeros = torch.full_like(found.scales, 8) if found.zeros is None else found.zeros.float()
    return Int4Grid(_stored(found.scales, scale_dtype), zeros, group_size or weight.shape[1], has_zeros)


def int8_grid(weight: Tensor, scale_dtype: torch.dtype) -> Int8Grid:
    return Int8Grid(_stored(ops.quantize_int8_weight(weight).scales[:, None], scale_dtype))


FP8_PHASES = tuple(2.0 ** (-step / 8) for step in range(8))


def fp8_grid(weight: Tensor, scale_dtype: torch.dtype) -> Fp8Grid:
    """One scale per row: the one with the least squared error of eight between amax / 448 and twice that.

    The relative rounding error of e4m3 hardly depends on the scale; the scale only moves the many small values of a row
    between two powers of two.
    """
    widest = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / E4M3_MAX
    best, least = _stored(widest, scale_dtype), torch.full_like(widest, torch.inf)
    every = torch.arange(weight.shape[1], device=weight.device)
    for phase in FP8_PHASES:
        scales = _stored(widest / phase, scale_dtype)
        error = (Fp8Grid(scales, weight.shape[1]).nearest(every, weight) - weight).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return Fp8Grid(best, weight.shape[1])


def fp8_block_grid(weight: Tensor, scale_dtype: torch.dtype) -> Fp8Grid:
    """One scale per 128 x 128."""
    scales = _stored(ops.quantize_fp8_blocks(weight)[1], scale_dtype)
    return Fp8Grid(scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]], BLOCK, BLOCK)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.to(dtype).float()
