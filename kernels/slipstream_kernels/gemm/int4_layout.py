"""The order of 4-bit weights for 16-bit rows in a Hopper GPU's memory: what repack_int4 makes there, and back.

Plain torch.  All kernels of 16-bit rows (skinny_gemm_w4a16, mixed_gemm_w4a16 and _pairs) read one order: tiles of 16
output features, in each the blocks of 128 input features, so that one copy brings a run of a tile's blocks; in a block,
the A fragments of matrix products as lanes hold them.  For FP8 rows: w4a8_layout.
"""

from __future__ import annotations

import torch

from slipstream_kernels.integer import SYMMETRIC_ZERO, Int4Weight

TILE = 16  # output features of a tile
BLOCK = 128  # input features of a block
# A block's nibbles: [input / 32][lane: row % 8, column % 16 / 4][row / 8, column / 16, column % 4]
ROW_AXES = (2, 8)  # of 16 output features: / 8, rest
COLUMN_AXES = (4, 2, 4, 4)  # of 128 input features: / 32, / 16, / 4, rest
LARGEST_SCALE = 16.0  # of a row, after its channel scale: (q - zero) * scale stays within e4m3's 448


def refusal(out_features: int, in_features: int, group_size: int) -> str | None:
    """Why a weight of these sizes has no such order; None if it has."""
    if out_features % TILE:
        return f"out_features: {out_features} is not a multiple of {TILE}"
    if in_features % BLOCK:
        return f"in_features: {in_features} is not a multiple of {BLOCK}"
    if group_size not in (64, BLOCK, in_features):
        return f"group_size: {group_size} is not 64, {BLOCK} or in_features"
    return None


def groups_per_block(group_size: int) -> int:
    """Groups with a scale of their own in 128 input features: 2 of 64, else 1 (of 128, or of whole rows)."""
    return 2 if group_size == BLOCK // 2 else 1


def pack_qweight(packed: torch.Tensor) -> torch.Tensor:
    """Canonical uint8 [out, in / 2] -> int32 [out / 16, in / 128, 256] in the kernels' order."""
    values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    out_features, in_features = values.shape
    blocks = values.view(out_features // TILE, *ROW_AXES, in_features // BLOCK, *COLUMN_AXES)
    # axes: tile, r8, row, block, c32, c16, c4, c  ->  tile, block, c32, row, c4, r8, c16, c
    ordered = blocks.permute(0, 3, 4, 2, 6, 1, 5, 7).reshape(out_features // TILE, in_features // BLOCK, -1)
    return (ordered[..., 0::2] | (ordered[..., 1::2] << 4)).contiguous().view(torch.int32)


def unpack_qweight(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_qweight."""
    packed = blocks.contiguous().view(torch.uint8)
    num_tiles, num_blocks = packed.shape[:2]
    values = torch.stack((packed & 15, packed >> 4), dim=-1)
    (r8, row), (c32, c16, c4, c) = ROW_AXES, COLUMN_AXES
    axes = values.view(num_tiles, num_blocks, c32, row, c4, r8, c16, c)
    rows = axes.permute(0, 5, 3, 1, 2, 6, 4, 7).reshape(num_tiles * TILE, num_blocks * BLOCK)
    return (rows[:, 0::2] | (rows[:, 1::2] << 4)).contiguous()


def pack_scales(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed scales int32, channel scales fp32 [out_features]) of a canonical weight.

    A packed scale is the fp16 scale of a row and group, divided by the row's channel scale, and its zero point in the
    high half.
    Packed scales: [2, blocks, out_features, groups of a block], blocks of 128 input features or one for whole rows.
    The second half holds the same numbers tile by tile: [out_features / 16, blocks, 16, groups].  It takes 3 % of the
    weight and saves skinny_gemm_w4a16 seven of eight copies.
    The channel scale of groups is a power of two, so that scales of fp16 or bf16 precision stay exact as far as fp16
    reaches (2^-28 of a row's largest); of whole rows it is the scale itself.
    """
    scales, out_features = weight.scales, weight.out_features
    if weight.group_size == weight.in_features and weight.in_features != BLOCK:
        channel, relative = scales[:, 0].contiguous(), torch.ones_like(scales)
    else:
        largest = scales.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        channel = torch.exp2(torch.ceil(torch.log2(largest))) / LARGEST_SCALE
        relative = scales / channel[:, None]
    zeros = torch.full_like(scales, SYMMETRIC_ZERO) if weight.zeros is None else weight.zeros
    bits = relative.half().view(torch.int16).int() & 0xFFFF
    packed = (bits | (zeros.int() << 16)).unflatten(1, (-1, groups_per_block(weight.group_size)))
    by_block = packed.transpose(0, 1).contiguous()
    by_tile = packed.unflatten(0, (-1, TILE)).transpose(1, 2).reshape(-1, out_features, packed.shape[2])
    return torch.stack((by_block, by_tile)), channel


def unpack_scales(packed_scales: torch.Tensor, channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of pack_scales: (scales fp32 [out_features, groups], zeros uint8 of that shape)."""
    rows = packed_scales[0].transpose(0, 1).flatten(1)
    relative = (rows & 0xFFFF).to(torch.int16).view(torch.float16).float()
    return relative * channel[:, None], (rows >> 16).to(torch.uint8)


def repack(weight: Int4Weight) -> Int4Weight:
    """The prepacked form of a canonical weight: `scales` holds packed scales, `zeros` the channel scales."""
    packed_scales, channel = pack_scales(weight)
    qweight = pack_qweight(weight.packed)
    return Int4Weight(qweight, packed_scales, channel, weight.group_size, weight.out_features, weight.in_features)


def canonical(weight: Int4Weight) -> Int4Weight:
    """The inverse of repack, with scales as rounded there; zeros are always given."""
    assert weight.zeros is not None
    scales, zeros = unpack_scales(weight.scales, weight.zeros)
    qweight = unpack_qweight(weight.packed)
    return Int4Weight(qweight, scales, zeros, weight.group_size, weight.out_features, weight.in_features)


def repack_experts(weight: Int4Weight) -> Int4Weight:
    """The form for the grouped W4A16 GEMM of a canonical weight that has all experts, by pairs of blocks.

    packed: [pair of blocks][tile of all experts][block of the pair][256]; scales: packed scales [pair][row][block]
    [groups of one], or [row][1] of whole rows; a last block without a second stands alone.  Both are flat: one copy
    brings any run of tiles.
    """
    qweight = pack_qweight(weight.packed)
    packed_scales, channel = pack_scales(weight)
    by_row = packed_scales[0].transpose(0, 1)
    sizes = weight.group_size, weight.out_features, weight.in_features
    return Int4Weight(_by_pairs(qweight), _by_pairs(by_row), channel, *sizes)


def _by_pairs(blocks: torch.Tensor) -> torch.Tensor:
    """[tiles or rows, blocks, n] -> flat [pairs of blocks, tiles or rows, 2, n], then the block without a second."""
    paired = blocks.shape[1] // 2 * 2
    pairs = blocks[:, :paired].unflatten(1, (-1, 2)).transpose(0, 1)
    return torch.cat((pairs.flatten(), blocks[:, paired:].flatten()))
