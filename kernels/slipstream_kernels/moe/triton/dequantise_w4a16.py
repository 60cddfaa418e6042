"""Writes experts' prepacked 4-bit weights (W4A16) as e4m3, which pays for many rows.

(q - zero point) * scale is rounded to e4m3 relative to its row's channel scale, which stays apart.
"""

from __future__ import annotations

import torch
import triton.language as tl

from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm.int4_layout import groups_per_block
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel

TILE, BLOCK = tl.constexpr(16), tl.constexpr(128)  # int4_layout.py


@step_kernel
def _dequantise_w4a16_kernel(
    qweight_ptr,
    scales_ptr,
    out_ptr,
    num_tiles,
    IN_FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_CHANNELWISE: tl.constexpr,
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
    tl.store(out, to_e4m3(values))


def dequantise_w4a16(weight: Int4Weight) -> torch.Tensor:
    """[out_features of all experts, in_features] e4m3 of a weight of ops.repack_expert_int4; scales: weight.zeros."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=E4M3, device=weight.packed.device)
    num_tiles, blocks = weight.out_features // TILE.value, weight.in_features // BLOCK.value
    is_channelwise = weight.scales.numel() == weight.out_features
    _dequantise_w4a16_kernel[(num_tiles, blocks)](
        weight.packed.view(torch.uint8),
        weight.scales,
        out,
        num_tiles,
        IN_FEATURES=weight.in_features,
        GROUPS=groups_per_block(weight.group_size),
        IS_CHANNELWISE=is_channelwise,
        **dependent_launch(out.device),
    )
    return out
