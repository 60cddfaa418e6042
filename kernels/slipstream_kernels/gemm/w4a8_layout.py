"""The order of 4-bit weights for FP8 rows in a Hopper GPU's memory: what repack_int4 makes there, and back.

Plain torch.  The mixed GEMM (W4A8), w4a8_gemm and the grouped W4A8 GEMM read one order of qweight:
csrc/formats/w4a8_layout.cuh.  Here scales and zero points lie apart; moe/grouped_w4a8_layout.py stores them in tiles.
"""

from __future__ import annotations

import torch

from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.int4_layout import BLOCK, TILE
from slipstream_kernels.gemm.reference.int4_mm import pack_int4, unpack_int4
from slipstream_kernels.integer import W4A8_DTYPE, Int4Weight

E4M3_STEP = 2.0**-9  # a 4-bit value q in the low bits of e4m3 is q times this
# The axes of a block's input features: piece of 512 bytes, half of the lane's 16 bytes, nibble, lane, byte
AXES = (2, 2, 2, 4, 4)


def repack(weight: Int4Weight) -> Int4Weight:
    """The prepacked form of a canonical 4-bit weight: `scales` holds packed scales, `zeros` the channel scales.

    packed: int64 [in_features / 128, out_features / 16, 128].  scales: int32 [blocks of 128 input features, or one of
    whole rows][out_features][groups of a block], as e4m3_scales returns them.
    """
    packed_scales, channel = int4_layout.pack_scales(weight)
    qweight = interleave_qweight(unpack_int4(weight.packed)).view(W4A8_DTYPE)
    sizes = weight.group_size, weight.out_features, weight.in_features
    return Int4Weight(qweight, e4m3_scales(packed_scales[0]).contiguous(), channel, *sizes)


def canonical(weight: Int4Weight) -> Int4Weight:
    """The inverse of repack, with scales as rounded there; zeros are always given."""
    assert weight.zeros is not None
    scale, bias = ((weight.scales >> shift).to(torch.int16).view(torch.float16).float() for shift in (0, 16))
    relative, zeros = (half.transpose(0, 1).flatten(1) for half in (scale * E4M3_STEP, bias / -E4M3_STEP))
    blocks, tiles = weight.packed.shape[:2]
    nibbles = unpack_int4(weight.packed.view(torch.uint8).flatten(0, 1))
    piece, half, nibble, lane, byte = AXES
    stored = nibbles.view(blocks, tiles, piece, TILE // 2, lane, half, 2, byte, nibble)
    # block, tile, piece, row, lane, half, row / 8, byte, nibble -> tile, row / 8, row, block, AXES
    values = stored.permute(1, 6, 3, 0, 2, 5, 8, 4, 7).reshape(weight.out_features, weight.in_features)
    scales = relative * weight.zeros[:, None]
    sizes = weight.group_size, weight.out_features, weight.in_features
    return Int4Weight(pack_int4(values), scales, zeros.to(torch.uint8), *sizes)


def interleave_qweight(values: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in] of 4-bit values -> [in / 128, out / 16, 1024] bytes of two values in the kernels' order."""
    axes = values.view(values.shape[0] // TILE, 2, TILE // 2, values.shape[1] // BLOCK, *AXES)
    # tile, row / 8, row, block, AXES -> block, tile, piece, row, lane, half, row / 8, byte, nibble
    ordered = axes.permute(3, 0, 4, 2, 7, 5, 1, 8, 6).flatten(2)
    return ordered[..., 0::2] | (ordered[..., 1::2] << 4)


def e4m3_scales(packed_scales: torch.Tensor) -> torch.Tensor:
    """Packed scales of int4_layout -> fp16 512 * scale in the low half, fp16 -zero point / 512 in the high half."""
    scale = (packed_scales & 0xFFFF).to(torch.int16).view(torch.float16).float() / E4M3_STEP
    bias = (packed_scales >> 16).float() * -E4M3_STEP
    low, high = (half.half().view(torch.int16).int() & 0xFFFF for half in (scale, bias))
    return low | (high << 16)


def sum_columns(group_size: int) -> int:
    """How many columns of a row share an activation sum in products with such a weight."""
    return BLOCK // int4_layout.groups_per_block(group_size)
