"""The order of experts' 4-bit weights for the grouped W4A8 GEMM: what repack_expert_int4 makes for FP8 rows.

Plain torch.  A block of a tile is 16 output features x 128 input features: 1,024 bytes of weights in the order of the
tensor cores' registers, then a packed scale for each output feature (gemm/w4a8_layout.py).  The tiles of a block of
input features follow each other, so that one copy brings any run of them.
"""

from __future__ import annotations

import torch

from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.int4_layout import BLOCK, TILE
from slipstream_kernels.gemm.reference.int4_mm import unpack_int4
from slipstream_kernels.gemm.w4a8_layout import e4m3_scales, interleave_qweight
from slipstream_kernels.integer import W4A8_DTYPE, Int4Weight


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why a canonical weight of so many experts has no such order; None if it has."""
    if weight.group_size not in (BLOCK, weight.in_features):
        return f"group_size: {weight.group_size} is not {BLOCK} or in_features"
    out_features = weight.out_features // num_experts
    if out_features % (2 * TILE):
        return f"out_features: {out_features} of an expert are not a multiple of {2 * TILE}"
    return f"in_features: {weight.in_features} is not a multiple of {BLOCK}" if weight.in_features % BLOCK else None


def repack_experts(weight: Int4Weight, num_experts: int) -> Int4Weight:
    """The prepacked form of a canonical weight that has all experts, one below the other.

    A scale of a whole row becomes scales of groups of 128.  A tile has 8 rows of the first half of an expert's output
    features and the same 8 rows of the second half: of gated products, gate and up.
    """
    packed_scales, channel = int4_layout.pack_scales(weight)
    by_row = packed_scales[0].transpose(0, 1).reshape(weight.out_features, -1)
    by_block = e4m3_scales(by_row.expand(-1, weight.in_features // BLOCK))
    scales = _pair_halves(by_block, num_experts).unflatten(0, (-1, TILE)).permute(2, 0, 1).contiguous()
    qweight = interleave_qweight(_pair_halves(unpack_int4(weight.packed), num_experts))
    tiles = torch.cat((qweight, scales.view(torch.uint8)), dim=2).view(W4A8_DTYPE)
    return Int4Weight(tiles, channel, None, weight.group_size, weight.out_features, weight.in_features)


def _pair_halves(rows: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows of all experts -> for each tile 8 rows of an expert's first half, then the same 8 of its second."""
    return rows.unflatten(0, (num_experts, 2, -1, TILE // 2)).transpose(1, 2).flatten(0, 3)
