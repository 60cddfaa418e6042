"""Writes experts' prepacked 4-bit weights (W4A16) as e4m3 or in 16 bits, which pays for many rows.

(q - zero point) * scale is rounded once: to e4m3 relative to its row's channel scale, which stays apart, or to bf16 or
fp16 with that scale.
"""

from __future__ import annotations

import torch
import triton.language as tl

from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm.int4_layout import groups_per_block
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import round_to, to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel

TILE, BLOCK = tl.constexpr(16), tl.constexpr(128)  # int4_layout.py


@step_kernel
def _dequantise_w4a16_kernel(
    qweight_ptr,
    scales_ptr,
    channel_ptr,
    out_ptr,
    num_tiles,
    IN_FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_CHANNELWISE: tl.constexpr,
    IS_E4M3: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # blocks lie in pairs; the tiles of a pair follow each other
    paired = tl.minimum(2, IN_FEATURES // BLOCK - block // 2 * 2)
    index = num_tiles.to(tl.int64) * (block // 2 * 2) + tile * paired + block % 2
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, BLOCK)[None, :]
    lanes = rows % 8 * 4 + columns % 16 // 4
    nibbles = columns % 32 // 16 * 4 + columns % 4
    offsets = columns // 32 * 256 + lanes * 8 + rows // 8 * 4 + nibbles // 2
    q = (tl.load(qweight_ptr + index * (TILE * BLOCK // 2) + offsets).to(tl.int32) >> (nibbles % 2 * 4)) & 15
    if IS_CHANNELWISE:
        packed = tl.load(scales_ptr + tile * TILE + rows + columns * 0)
    else:
        first = (num_tiles.to(tl.int64) * (block // 2 * 2) + tile * paired) * TILE
        groups = columns // (BLOCK // GROUPS)
        packed = tl.load(scales_ptr + (first + rows * paired + block % 2) * GROUPS + groups)
    scales = (packed & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    values = (q - (packed >> 16)).to(tl.float32) * scales
    out = out_ptr + (tile * TILE + rows) * IN_FEATURES + block * BLOCK + columns
    if IS_E4M3:
        tl.store(out, to_e4m3(values))
    else:
        # A channel scale of groups is a power of two: fp32 holds the product without rounding.
        channel = tl.load(channel_ptr + tile * TILE + rows)
        tl.store(out, round_to(values * channel, out_ptr.dtype.element_ty))


def dequantise_w4a16(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out_features of all experts, in_features] of a weight of ops.repack_expert_int4.

    dtype: bf16, fp16, or e4m3, which is relative to the channel scales, weight.zeros.
    """
    assert weight.zeros is not None
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.packed.device)
    num_tiles, blocks = weight.out_features // TILE.value, weight.in_features // BLOCK.value
    is_channelwise = weight.scales.numel() == weight.out_features
    _dequantise_w4a16_kernel[(num_tiles, blocks)](
        weight.packed.view(torch.uint8),
        weight.scales,
        weight.zeros,
        out,
        num_tiles,
        IN_FEATURES=weight.in_features,
        GROUPS=groups_per_block(weight.group_size),
        IS_CHANNELWISE=is_channelwise,
        IS_E4M3=dtype == E4M3,
        **dependent_launch(out.device),
    )
    return out
