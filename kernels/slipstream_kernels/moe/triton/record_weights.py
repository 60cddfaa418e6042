"""4-bit weights of experts stored as records (expert_records.py), written out as e4m3: many rows pay that back.

(code - zero) * scale is rounded to e4m3 relative to its row's channel scale, which stays apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.interpreter import to_e4m3

STRIP, BLOCK = tl.constexpr(16), tl.constexpr(128)  # expert_records.py
CODE_BYTES = tl.constexpr(STRIP.value * BLOCK.value // 2)


@triton.jit
def _record_weights_kernel(
    records_ptr,
    out_ptr,
    num_strips,
    half_features,
    IN_FEATURES: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    strip, block = tl.program_id(0), tl.program_id(1)
    record = records_ptr + (block.to(tl.int64) * num_strips + strip) * RECORD_BYTES
    rows, columns = tl.arange(0, STRIP)[:, None], tl.arange(0, BLOCK)[None, :]
    lanes = rows % 8 * 4 + columns % 16 // 4
    offsets = columns // 64 * 512 + lanes * 16 + columns // 32 % 2 * 8 + rows // 8 * 4 + columns % 4
    codes = (tl.load(record + offsets).to(tl.int32) >> (columns // 16 % 2 * 4)) & 15
    words = tl.load((record + CODE_BYTES).to(tl.pointer_type(tl.int32)) + rows)
    scales = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # times 512
    zeros = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # minus the zero point, / 512
    values = scales * (codes.to(tl.float32) / 512 + zeros)
    strips_of_one = half_features // 8  # of an expert
    expert, place = strip // strips_of_one, strip % strips_of_one
    features = (2 * expert + rows // 8).to(tl.int64) * half_features + place * 8 + rows % 8
    tl.store(out_ptr + features * IN_FEATURES + block * BLOCK + columns, to_e4m3(values))


def record_weights(weight: Int4Weight, num_experts: int) -> torch.Tensor:
    """[out_features of all experts, in_features] e4m3; scales of its rows: weight.scales."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=E4M3, device=weight.packed.device)
    blocks, strips, _ = weight.packed.shape
    _record_weights_kernel[(strips, blocks)](
        weight.packed.view(torch.uint8),
        out,
        strips,
        weight.out_features // num_experts // 2,
        IN_FEATURES=weight.in_features,
        RECORD_BYTES=8 * weight.packed.shape[2],
        **dependent_launch(out.device),
    )
    return out
