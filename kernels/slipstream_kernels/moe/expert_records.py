"""4-bit weights of experts as records, which cuda/record_experts reads: how they are made.  Plain torch.

A record is 16 output features x 128 input features: codes, lane by lane as the registers of the tensor cores take them,
then a word for each output feature: fp16 512 * scale, and fp16 -zero / 512 above it.  Records of a block of input
features follow each other, so that one copy brings any run of them.
"""

from __future__ import annotations

import torch

from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.reference.int4_mm import unpack_int4
from slipstream_kernels.integer import RECORDS, Int4Weight

STRIP, BLOCK = 16, 128  # output and input features of a record
E4M3_STEP = 2.0**-9  # a nibble in the low bits of e4m3 is so much times its code
# A block's input features by the places of their digits: piece of 512 bytes, half of the lane's 16, nibble, lane, byte
DIGITS = (2, 2, 2, 4, 4)


def refusal(weight: Int4Weight, num_experts: int) -> str | None:
    """Why a canonical weight of so many experts has no records; None if it has."""
    if weight.group_size not in (BLOCK, weight.in_features):
        return f"group_size: {weight.group_size} is not {BLOCK} or in_features"
    out_features = weight.out_features // num_experts
    if out_features % (2 * STRIP):
        return f"out_features: {out_features} of an expert are not a multiple of {2 * STRIP}"
    return f"in_features: {weight.in_features} is not a multiple of {BLOCK}" if weight.in_features % BLOCK else None


def pack_experts(weight: Int4Weight, num_experts: int) -> Int4Weight:
    """The canonical weight of all experts, one below the other, as records; one group a row becomes groups of 128.

    A record has 8 rows of the first half of an expert's output features and the 8 of the second that stand as far: of
    gated products, gate and up.
    """
    words, channel = int4_layout.pack_scales(weight)
    of_rows = words[0].transpose(0, 1).reshape(weight.out_features, -1).expand(-1, weight.in_features // BLOCK)
    ordered = _paired(pack_words(of_rows), num_experts).unflatten(0, (-1, STRIP)).permute(2, 0, 1).contiguous()
    codes = codes_in_order(_paired(unpack_int4(weight.packed), num_experts))
    records = torch.cat((codes, ordered.view(torch.uint8)), dim=2).view(RECORDS)
    return Int4Weight(records, channel, None, weight.group_size, weight.out_features, weight.in_features)


def pack_words(words: torch.Tensor) -> torch.Tensor:
    """Words of fp16 scale and zero point -> fp16 512 * scale, and fp16 -zero / 512 above it."""
    scale = (words & 0xFFFF).to(torch.int16).view(torch.float16).float() / E4M3_STEP
    bias = (words >> 16).float() * -E4M3_STEP
    low, high = (half.half().view(torch.int16).int() & 0xFFFF for half in (scale, bias))
    return low | (high << 16)


def _paired(rows: torch.Tensor, num_experts: int) -> torch.Tensor:
    return rows.unflatten(0, (num_experts, 2, -1, STRIP // 2)).transpose(1, 2).flatten(0, 3)


def codes_in_order(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in] of codes -> [in / 128, out / 16, 1024] of nibbles in the order of memory."""
    axes = codes.view(codes.shape[0] // STRIP, 2, STRIP // 2, codes.shape[1] // BLOCK, *DIGITS)
    # strip, half, row, block, digits -> block, strip, piece, row, lane, eight, half, byte, nibble
    ordered = axes.permute(3, 0, 4, 2, 7, 5, 1, 8, 6).flatten(2)
    return ordered[..., 0::2] | (ordered[..., 1::2] << 4)
