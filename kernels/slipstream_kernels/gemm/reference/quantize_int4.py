"""quantize_int4 and quantize_int8_weight in plain torch: a grid search of scales, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream_kernels.gemm.reference.int4_mm import dequantize_int4, pack_int4, unpack_int4
from slipstream_kernels.integer import INT8_MAX, MAX_CODE, SMALLEST_AMAX, SYMMETRIC_ZERO, Int4Weight, Int8Rows

__all__ = ["dequantize_int4", "pack_int4", "quantize_int4", "quantize_int8_weight", "unpack_int4"]

# Shares of the range that are tried. Finer grids gain below 1 % of the error (docs/measurements).
INT4_SHARES = tuple(1.0 - 0.04 * step for step in range(12))
INT8_SHARES = tuple(1.0 - 0.03 * step for step in range(8))
CHUNK_ELEMENTS = 1 << 25  # of a weight at a time: temporaries stay at some 100 MB each


def quantize_int4(
    weight: torch.Tensor, group_size: int, has_zeros: bool, importance: torch.Tensor | None
) -> Int4Weight:
    """See ops.quantize_int4."""
    out_features, in_features = weight.shape
    parts = []
    for rows in _chunks(weight):
        groups = rows.float().unflatten(1, (-1, group_size))
        weights = None if importance is None else importance.float().view(-1, group_size)
        scales, zeros = _search_zeros(groups, weights) if has_zeros else _search_symmetric(groups, weights)
        codes = _codes(groups, scales, zeros).to(torch.uint8)
        parts.append((pack_int4(codes.flatten(1)), scales, zeros.to(torch.uint8)))
    packed, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts))
    return Int4Weight(packed, scales, zeros if has_zeros else None, group_size, out_features, in_features)


def quantize_int8_weight(weight: torch.Tensor) -> Int8Rows:
    """See ops.quantize_int8_weight."""
    parts = []
    for chunk in _chunks(weight):
        rows = chunk.float()
        widest = rows.abs().amax(-1).clamp(min=SMALLEST_AMAX) / INT8_MAX
        best, least = widest, torch.full_like(widest, torch.inf)
        for share in INT8_SHARES:
            scales = widest * share
            quantised = (rows / scales[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).mul_(scales[:, None])
            best, least = _keep_better(best, least, scales, quantised.sub_(rows).square_().sum(-1))
        parts.append(((rows / best[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), best))
    values, scales = (torch.cat(tensors) for tensors in zip(*parts))
    return Int8Rows(values, scales, weight.dtype)


def _chunks(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(weight.split(max(CHUNK_ELEMENTS // weight.shape[1], 1)))


def _search_symmetric(groups: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """groups: [rows, groups, group_size] -> scales, zero-points (8) [rows, groups]."""
    low, high = groups.amin(-1), groups.amax(-1)
    extreme = torch.where(high > -low, high, low)
    extreme = torch.where(extreme.abs() < SMALLEST_AMAX, torch.full_like(extreme, SMALLEST_AMAX), extreme)
    zeros = torch.full_like(extreme, SYMMETRIC_ZERO)
    best, least = extreme / -SYMMETRIC_ZERO, torch.full_like(extreme, torch.inf)
    for share in INT4_SHARES:
        scales = extreme * (share / -SYMMETRIC_ZERO)
        best, least = _keep_better(best, least, scales, _error(groups, scales, zeros, importance))
    return best, zeros


def _search_zeros(groups: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    width = (high - low).clamp(min=SMALLEST_AMAX)
    best, least = width / MAX_CODE, torch.full_like(width, torch.inf)
    best_zeros = torch.zeros_like(width)
    for share in INT4_SHARES:
        scales = width * (share / MAX_CODE)
        zeros = (-low * share / scales).round_().clamp_(0, MAX_CODE)
        error = _error(groups, scales, zeros, importance)
        best_zeros = torch.where(error < least, zeros, best_zeros)
        best, least = _keep_better(best, least, scales, error)
    return best, best_zeros


def _keep_better(
    best: torch.Tensor, least: torch.Tensor, scales: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.where(error < least, scales, best), torch.minimum(error, least)


def _codes(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, MAX_CODE)


def _error(
    groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, importance: torch.Tensor | None
) -> torch.Tensor:
    quantised = _codes(groups, scales, zeros).sub_(zeros[..., None]).mul_(scales[..., None])
    squares = quantised.sub_(groups).square_()
    return (squares if importance is None else squares.mul_(importance)).sum(-1)
