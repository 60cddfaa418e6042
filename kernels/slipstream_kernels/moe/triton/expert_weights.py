"""4-bit weights of experts, in the order of cuda/int4_experts, written out as e4m3: many rows pay that back.

(code - zero) * scale is rounded to e4m3 relative to its row's channel scale, which stays apart: what FP8 products take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm.int4_layout import groups_per_block
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import to_e4m3

STRIP, BLOCK = tl.constexpr(16), tl.constexpr(128)  # int4_layout.py


@triton.jit
def _expert_weights_kernel(
    codes_ptr,
    words_ptr,
    out_ptr,
    num_strips,
    IN_FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_CHANNELWISE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    strip, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # blocks lie in pairs, the strips of a pair together
    paired = tl.minimum(2, IN_FEATURES // BLOCK - block // 2 * 2)
    place = num_strips.to(tl.int64) * (block // 2 * 2) + strip * paired + block % 2
    rows, columns = tl.arange(0, STRIP)[:, None], tl.arange(0, BLOCK)[None, :]
    lanes = rows % 8 * 4 + columns % 16 // 4
    nibbles = columns % 32 // 16 * 4 + columns % 4
    offsets = columns // 32 * 256 + lanes * 8 + rows // 8 * 4 + nibbles // 2
    codes = (tl.load(codes_ptr + place * (STRIP * BLOCK // 2) + offsets).to(tl.int32) >> (nibbles % 2 * 4)) & 15
    if IS_CHANNELWISE:
        words = tl.load(words_ptr + strip * STRIP + rows + columns * 0)
    else:
        first = (num_strips.to(tl.int64) * (block // 2 * 2) + strip * paired) * STRIP
        groups = columns // (BLOCK // GROUPS)
        words = tl.load(words_ptr + (first + rows * paired + block % 2) * GROUPS + groups)
    scales = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    values = (codes - (words >> 16)).to(tl.float32) * scales
    out = out_ptr + (strip * STRIP + rows) * IN_FEATURES + block * BLOCK + columns
    tl.store(out, to_e4m3(values))


def expert_weights(weight: Int4Weight) -> torch.Tensor:
    """[out_features of all experts, in_features] e4m3 of a weight of ops.repack_expert_int4; scales: weight.zeros."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=E4M3, device=weight.packed.device)
    num_strips, blocks = weight.out_features // STRIP.value, weight.in_features // BLOCK.value
    is_channelwise = weight.scales.numel() == weight.out_features
    _expert_weights_kernel[(num_strips, blocks)](
        weight.packed.view(torch.uint8),
        weight.scales,
        out,
        num_strips,
        IN_FEATURES=weight.in_features,
        GROUPS=groups_per_block(weight.group_size),
        IS_CHANNELWISE=is_channelwise,
        **dependent_launch(out.device),
    )
    return out
