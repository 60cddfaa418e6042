"""The order of 4-bit weights in a Hopper GPU's memory: what repack_int4 makes there, and back.  Plain torch.

One order serves both kernels: few tokens (cuda/int4_stream) and many (cuda/w4a8_gemm).  It is that of
cuda/include/w4a8_layout.cuh: blocks of 64 output x 128 input features, 4,096 bytes side by side, so that one copy
brings any run of blocks of a strip; inside, the A fragments of matrix products as lanes hold them.
"""

from __future__ import annotations

import torch

from slipstream_kernels.integer import SYMMETRIC_ZERO, Int4Weight

STRIP = 64  # output features of a block
DEPTH = 128  # input features of a block
# A block's nibbles: [output / 16][input / 32][lane: row % 8, column % 16 / 4][row / 8, column / 16, column % 4]
ROW_AXES = (4, 2, 8)  # of 64 output features: / 16, / 8, rest
COLUMN_AXES = (4, 2, 4, 4)  # of 128 input features: / 32, / 16, / 4, rest
LARGEST_SCALE = 16.0  # of a row, after its channel scale: (code - zero) * scale stays within e4m3's 448


def refusal(out_features: int, in_features: int, group_size: int) -> str | None:
    """Why a weight of these sizes has no such order; None if it has."""
    if out_features % STRIP:
        return f"out_features: {out_features} is not a multiple of {STRIP}"
    if in_features % DEPTH:
        return f"in_features: {in_features} is not a multiple of {DEPTH}"
    if group_size not in (64, DEPTH, in_features):
        return f"group_size: {group_size} is not 64, {DEPTH} or in_features"
    return None


def pack_codes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2] of canonical codes -> int32 [out / 64, in / 128, 1024] in the kernels' order."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    out_features, in_features = codes.shape
    blocks = codes.view(out_features // STRIP, *ROW_AXES, in_features // DEPTH, *COLUMN_AXES)
    # axes: strip, r16, r8, row, block, c32, c16, c4, c  ->  strip, block, r16, c32, row, c4, r8, c16, c
    ordered = blocks.permute(0, 4, 1, 5, 3, 7, 2, 6, 8).reshape(out_features // STRIP, in_features // DEPTH, -1)
    return (ordered[..., 0::2] | (ordered[..., 1::2] << 4)).contiguous().view(torch.int32)


def unpack_codes(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_codes."""
    packed = blocks.contiguous().view(torch.uint8)
    strips, depth = packed.shape[:2]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1)
    r16, r8, row = ROW_AXES
    c32, c16, c4, c = COLUMN_AXES
    axes = codes.view(strips, depth, r16, c32, row, c4, r8, c16, c)
    rows = axes.permute(0, 2, 6, 4, 1, 3, 7, 5, 8).reshape(strips * STRIP, depth * DEPTH)
    return (rows[:, 0::2] | (rows[:, 1::2] << 4)).contiguous()


def pack_scales(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(words int32, channel scales fp32 [out_features]) of a canonical weight.

    A word is the fp16 scale of a row and group, divided by the row's channel scale, and its zero point above it.
    words: [groups, out_features], of groups of 128 or the whole row; [groups / 2, out_features, 2] of groups of 64.
    The channel scale of groups is a power of two, so that scales of fp16 or bf16 precision stay what they were as far
    as fp16 reaches (2^-28 of a row's largest); of whole rows it is the scale itself.
    """
    scales = weight.scales
    if weight.group_size == weight.in_features and weight.in_features != DEPTH:
        channel, relative = scales[:, 0].contiguous(), torch.ones_like(scales)
    else:
        largest = scales.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        channel = torch.exp2(torch.ceil(torch.log2(largest))) / LARGEST_SCALE
        relative = scales / channel[:, None]
    zeros = torch.full_like(scales, SYMMETRIC_ZERO) if weight.zeros is None else weight.zeros
    bits = relative.half().view(torch.int16).int() & 0xFFFF
    words = bits | (zeros.int() << 16)
    if weight.group_size == DEPTH // 2:
        return words.unflatten(1, (-1, 2)).transpose(0, 1).contiguous(), channel
    return words.t().contiguous(), channel


def unpack_scales(words: torch.Tensor, channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales fp32 [out_features, groups], zeros uint8 of that shape): what the kernels take for a row's group."""
    rows = words.transpose(0, 1).flatten(1) if words.dim() == 3 else words.t()
    relative = (rows & 0xFFFF).to(torch.int16).view(torch.float16).float()
    return relative * channel[:, None], (rows >> 16).to(torch.uint8)


def repack(weight: Int4Weight) -> Int4Weight:
    """The canonical weight in the kernels' order: `scales` holds the words, `zeros` the channel scales."""
    words, channel = pack_scales(weight)
    return Int4Weight(
        pack_codes(weight.packed), words, channel, weight.group_size, weight.out_features, weight.in_features
    )


def canonical(weight: Int4Weight) -> Int4Weight:
    """The inverse of repack, with scales as rounded there; zeros are always given."""
    assert weight.zeros is not None
    scales, zeros = unpack_scales(weight.scales, weight.zeros)
    codes = unpack_codes(weight.packed)
    return Int4Weight(codes, scales, zeros, weight.group_size, weight.out_features, weight.in_features)
