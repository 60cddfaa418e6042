"""The order of 4-bit weights for FP8 rows in a Hopper GPU's memory: what repack_int4 makes there, and back.

One order of codes serves few rows (mixed_gemm_w4a8) and many (w4a8_gemm), and the records of experts:
csrc/formats/w4a8_layout.cuh.  Words of scales and zero points lie apart here.  Plain torch.
"""

from __future__ import annotations

import torch

from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.reference.int4_mm import pack_int4, unpack_int4
from slipstream_kernels.integer import RECORDS, Int4Weight
from slipstream_kernels.moe.expert_records import BLOCK, DIGITS, E4M3_STEP, STRIP, codes_in_order, pack_words


def repack(weight: Int4Weight) -> Int4Weight:
    """A canonical 4-bit weight in the kernels' order: `scales` holds words, `zeros` the channel scales.

    packed: int64 [in_features / 128, out_features / 16, 128].  scales: int32 [blocks of 128 input features, or one of
    whole rows][out_features][groups of a block], fp16 512 * scale / channel scale, and fp16 -zero / 512 above it.
    """
    words, channel = int4_layout.pack_scales(weight)
    codes = codes_in_order(unpack_int4(weight.packed)).view(RECORDS)
    sizes = weight.group_size, weight.out_features, weight.in_features
    return Int4Weight(codes, pack_words(words[0]).contiguous(), channel, *sizes)


def canonical(weight: Int4Weight) -> Int4Weight:
    """The inverse of repack, with scales as rounded there; zeros are always given."""
    assert weight.zeros is not None
    scale, bias = ((weight.scales >> shift).to(torch.int16).view(torch.float16).float() for shift in (0, 16))
    relative, zeros = (half.transpose(0, 1).flatten(1) for half in (scale * E4M3_STEP, bias / -E4M3_STEP))
    blocks, strips = weight.packed.shape[:2]
    nibbles = unpack_int4(weight.packed.view(torch.uint8).flatten(0, 1))
    piece, eight, nibble, lane, byte = DIGITS
    stored = nibbles.view(blocks, strips, piece, STRIP // 2, lane, eight, 2, byte, nibble)
    # block, strip, piece, row, lane, eight, half, byte, nibble -> strip, half, row, block, the digits
    codes = stored.permute(1, 6, 3, 0, 2, 5, 8, 4, 7).reshape(weight.out_features, weight.in_features)
    scales = relative * weight.zeros[:, None]
    sizes = weight.group_size, weight.out_features, weight.in_features
    return Int4Weight(pack_int4(codes), scales, zeros.to(torch.uint8), *sizes)


def total_columns(group_size: int) -> int:
    """Of what runs of a row's values products with such a weight take the sums."""
    return BLOCK // int4_layout.groups_per_block(group_size)
