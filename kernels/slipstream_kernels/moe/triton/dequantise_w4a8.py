"""Writes experts' prepacked 4-bit weights (W4A8) as e4m3, which pays for many rows.

(q - zero point) * scale is rounded to e4m3 relative to its row's channel scale, which stays apart.
"""

from __future__ import annotations

import torch
import triton.language as tl

from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import to_e4m3
from slipstream_kernels.triton.step_kernel import step_kernel

TILE, BLOCK = tl.constexpr(16), tl.constexpr(128)  # grouped_w4a8_layout.py
QWEIGHT_BYTES = tl.constexpr(TILE.value * BLOCK.value // 2)


@step_kernel
def _dequantise_w4a8_kernel(
    qweight_ptr,
    out_ptr,
    num_tiles,
    half_features,
    IN_FEATURES: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    tile, block = tl.program_id(0), tl.program_id(1)
    block_of_tile = qweight_ptr + (block.to(tl.int64) * num_tiles + tile) * TILE_BYTES
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, BLOCK)[None, :]
    lanes = rows % 8 * 4 + columns % 16 // 4
    offsets = columns // 64 * 512 + lanes * 16 + columns // 32 % 2 * 8 + rows // 8 * 4 + columns % 4
    q = (tl.load(block_of_tile + offsets).to(tl.int32) >> (columns // 16 % 2 * 4)) & 15
    packed = tl.load((block_of_tile + QWEIGHT_BYTES).to(tl.pointer_type(tl.int32)) + rows)
    scales = (packed & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # times 512
    zeros = (packed >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # minus the zero point, / 512
    values = scales * (q.to(tl.float32) / 512 + zeros)
    tiles_of_one = half_features // 8  # of an expert
    expert, local = tile // tiles_of_one, tile % tiles_of_one
    features = (2 * expert + rows // 8).to(tl.int64) * half_features + local * 8 + rows % 8
    tl.store(out_ptr + features * IN_FEATURES + block * BLOCK + columns, to_e4m3(values))


def dequantise_w4a8(weight: Int4Weight, num_experts: int) -> torch.Tensor:
    """[out_features of all experts, in_features] e4m3; scales of its rows: weight.scales."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=E4M3, device=weight.packed.device)
    blocks, tiles, _ = weight.packed.shape
    _dequantise_w4a8_kernel[(tiles, blocks)](
        weight.packed.view(torch.uint8),
        out,
        tiles,
        weight.out_features // num_experts // 2,
        IN_FEATURES=weight.in_features,
        TILE_BYTES=8 * weight.packed.shape[2],
        **dependent_launch(out.device),
    )
    return out
