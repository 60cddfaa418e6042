"""int4_mm on a CPU of canonical weights: a piece at a time is written out in fp32.  Packed ones: int4_packed.py.

Even and odd input features are written out apart, as their codes lie in low and high nibbles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.gemm.cpu import int4_packed
from slipstream_kernels.integer import SYMMETRIC_ZERO, Int4Weight

PIECE_ELEMENTS = 1 << 18  # written out at a time: stays in the second-level cache


def int4_mm(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ops.int4_mm."""
    if weight.is_repacked:
        return int4_packed.int4_mm(x, weight, bias)
    wide = x.float()
    halves = wide[:, 0::2].contiguous(), wide[:, 1::2].contiguous()
    step = max(1, PIECE_ELEMENTS // weight.in_features)
    pieces = [_piece(halves, weight, slice(first, first + step)) for first in range(0, weight.out_features, step)]
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    if bias is not None:
        y += bias
    return y.to(x.dtype)


def _piece(halves: tuple[torch.Tensor, torch.Tensor], weight: Int4Weight, rows: slice) -> torch.Tensor:
    packed, scales = weight.packed[rows], weight.scales[rows, :, None]
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros[rows, :, None].float()
    sums = [F.linear(x, _written_out(codes, scales, zeros)) for x, codes in zip(halves, (packed & 15, packed >> 4))]
    return sums[0].add_(sums[1])


def _written_out(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | int) -> torch.Tensor:
    return codes.float().unflatten(1, (scales.shape[1], -1)).sub_(zeros).mul_(scales).flatten(1)
