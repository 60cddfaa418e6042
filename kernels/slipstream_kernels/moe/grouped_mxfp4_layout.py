"""The order of MXFP4 experts in a Hopper GPU's memory, which grouped_mxfp4_gemm reads, and back.

Plain torch.  Units of 32 output features by 64 input features follow each other along the input features, so that a
stream of them is one piece of memory: the A fragments of matrix products as lanes hold them, then the units' scales.

A lane (row % 8, 4 parts of 16 input features) holds 8 words: [row / 16][row / 8 % 2][half of the part]; a word's
eight codes are four pairs of neighbours, even ones in its low half.  A scale is the biased exponent of the bf16 that
the kernel multiplies by: [row % 8][group of 32][row / 16][row / 8 % 2] bytes.
"""

from __future__ import annotations

import torch

from slipstream_kernels.integer import Int4Weight

FEATURES, INPUTS, GROUP = 32, 64, 32  # of a unit; input features with the same scale
CODE_WORDS, WORDS = 256, 272  # of a unit
SCALE_OFFSET, LARGEST_SCALE = 94, 160  # the kernel multiplies 2^-126 of the codes, and sums by 2^32
# Where a half of a word has sign, exponent (two bits) and fraction of its pairs: the first three as bf16 has them, and
# the last in their gaps, from which one product takes it.
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (11, 10, 14, 13))


def refusal(out_features: int, in_features: int) -> str | None:
    """Why experts of these sizes have no such order; None if they have."""
    if out_features % FEATURES:
        return f"out_features: {out_features} of an expert are not a multiple of {FEATURES}"
    if in_features % GROUP:
        return f"in_features: {in_features} are not a multiple of {GROUP}"
    return None


def repack_experts(weight: Int4Weight, num_experts: int) -> Int4Weight:
    """A canonical MXFP4 weight in that order: packed int32 [out_features of all / 32, units, 272], no other tensors.

    Expert by expert: intermediate results take eight times the bytes of an expert.
    """
    experts = zip(weight.packed.chunk(num_experts), weight.scales.chunk(num_experts), strict=True)
    shape = (weight.out_features // FEATURES, -(-weight.in_features // INPUTS), WORDS)
    packed = torch.empty(shape, dtype=torch.int32, device=weight.packed.device)
    for to, (codes, scales) in zip(packed.chunk(num_experts), experts, strict=True):
        to[..., :CODE_WORDS] = _code_words(codes, shape[1])
        to[..., CODE_WORDS:] = _scale_words(scales, shape[1])
    return Int4Weight(
        packed, weight.scales.new_empty(0), None, GROUP, weight.out_features, weight.in_features, is_e2m1=True
    )


def unpack_experts(weight: Int4Weight) -> Int4Weight:
    """The canonical weight that repack_experts was given (scales above LARGEST_SCALE are that)."""
    tiles, units, _ = weight.packed.shape
    words = weight.packed[..., :CODE_WORDS].reshape(tiles, units, 2, 8, 4, 2, 2)
    codes = torch.empty(*words.shape, 4, 2, dtype=torch.uint8, device=words.device)
    for pair, places in enumerate(PLACES):
        for half in range(2):
            bits = [(words >> (place + 16 * half)) & 1 for place in places]
            codes[..., pair, half] = 8 * bits[0] + 4 * bits[1] + 2 * bits[2] + bits[3]
    # tile, unit, r16, row, part, r8, word, pair, half -> tile, r16, r8, row, unit, part, word, pair, half
    rows = codes.permute(0, 2, 5, 3, 1, 4, 6, 7, 8).reshape(weight.out_features, -1)[:, : weight.in_features]
    scales = weight.packed[..., CODE_WORDS:].contiguous().view(torch.uint8).view(tiles, units, 8, 2, 2, 2)
    groups = scales.permute(0, 4, 5, 2, 1, 3).reshape(weight.out_features, -1)[:, : weight.in_features // GROUP]
    packed = (rows[:, 0::2] | (rows[:, 1::2] << 4)).contiguous()
    return Int4Weight(packed, groups - SCALE_OFFSET, None, GROUP, weight.out_features, weight.in_features, is_e2m1=True)


def _code_words(packed: torch.Tensor, units: int) -> torch.Tensor:
    """[tiles, units, 256] int32 of canonical codes [out, in / 2]."""
    padded = torch.nn.functional.pad(packed, (0, INPUTS // 2 * units - packed.shape[1]))
    pairs = padded.view(-1, 2, 2, 8, units, 4, 2, 4)  # tile, r16, r8, row, unit, part, word, pair
    ordered = pairs.permute(0, 4, 1, 3, 5, 2, 6, 7).int()
    words = torch.zeros(ordered.shape[:-1], dtype=torch.int32, device=packed.device)
    for pair, places in enumerate(PLACES):
        for half in range(2):
            for bit, place in enumerate(places):
                words |= ((ordered[..., pair] >> (4 * half + 3 - bit)) & 1) << (place + 16 * half)
    return words.flatten(2)


def _scale_words(scales: torch.Tensor, units: int) -> torch.Tensor:
    """[tiles, units, 16] int32 of canonical scales [out, groups]."""
    exponents = scales.clamp(max=LARGEST_SCALE) + SCALE_OFFSET
    padded = torch.nn.functional.pad(exponents, (0, 2 * units - scales.shape[1]), value=SCALE_OFFSET)
    groups = padded.view(-1, 2, 2, 8, units, 2)  # tile, r16, r8, row, unit, group
    return groups.permute(0, 4, 3, 5, 1, 2).reshape(-1, units, 64).contiguous().view(torch.int32)
