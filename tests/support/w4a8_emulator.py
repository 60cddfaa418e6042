"""Emulates the CUDA kernels of 4-bit weights and FP8 rows in plain torch, lane by lane and bit by bit.

Written from the instructions of csrc/formats/mixed_gemm_formats.cuh and w4a8_mainloop.cuh, and from the registers of
Hopper's products (PTX ISA, wgmma: first operand in registers), not from w4a8_layout: the two meet in a test.
"""

from __future__ import annotations

from collections.abc import Iterator

import int4_emulator
import torch
from slipstream_kernels.fp8 import E4M3, Fp8Rows
from slipstream_kernels.integer import Int4Weight

TILE, BLOCK = 16, 128
LANES = torch.arange(32)


def few_rows(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """mixed_gemm_w4a8: fp32 sums of groups, with the zero point times the sum of activations, scaled."""
    assert rows.activation_sums is not None
    sums, groups = torch.zeros(rows.num_tokens, weight.out_features), weight.scales.shape[2]
    activation_sums = rows.activation_sums.transpose(0, 1).flatten(1)[:, : rows.num_tokens, None]
    for block, tile, features in _tiles(weight):
        a, of_rows = operands(weight, block, tile), _packed_scales(weight, block, tile)
        for group, packed in enumerate(of_rows.unbind(1)):
            local = slice(group * BLOCK // groups, (group + 1) * BLOCK // groups)
            parts = rows.values[:, block * BLOCK :][:, local].float() @ a[:, local].t()
            sums[:, features] += _half(packed) * (parts + _half(packed >> 16) * activation_sums[block * groups + group])
    return _finish(sums, rows, weight, bias)


def many_rows(rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """w4a8_gemm: products of the table's e4m3 numbers, scaled and biased at the end."""
    return _finish(rows.values.float() @ table_operand(weight).t(), rows, weight, bias)


def operands(weight: Int4Weight, block: int, tile: int) -> torch.Tensor:
    """fp32 [16, 128]: what a warp's registers hold in mixed_gemm_w4a8's products, by row and by the token's feature."""
    matrix = torch.full((TILE, BLOCK), float("nan"))
    for phase, raw in enumerate(_raw(weight, block, tile)):
        for step, (upper, lower) in enumerate(((raw[:, 0], raw[:, 1]), (raw[:, 2], raw[:, 3]))):
            registers = (upper & 0x0F0F0F0F, lower & 0x0F0F0F0F, upper >> 4 & 0x0F0F0F0F, lower >> 4 & 0x0F0F0F0F)
            for number, register in enumerate(registers):
                for byte in range(4):
                    feature = 64 * phase + 32 * step + 16 * (number // 2) + 4 * (LANES % 4) + byte
                    values = (register >> 8 * byte & 0xFF).to(torch.uint8).view(E4M3).float()
                    matrix[LANES // 4 + 8 * (number % 2), feature] = values
    return matrix


def table_operand(weight: Int4Weight) -> torch.Tensor:
    """The e4m3 number that stands for each weight in w4a8_gemm, without the channel scale; fp32."""
    matrix, groups = torch.full((weight.out_features, weight.in_features), float("nan")), weight.scales.shape[2]
    for block, tile, features in _tiles(weight):
        raw, of_rows = _raw(weight, block, tile), _packed_scales(weight, block, tile)
        for step in range(4):  # of 32 input features
            for half in range(2):  # of the tile's rows
                row = LANES // 4 + 8 * half
                table = int4_emulator.table_words(of_rows[row, step * groups // 4])
                entries = int4_emulator.look_up(raw[step // 2, :, step % 2 * 2 + half], table)
                for i in range(8):
                    feature = block * BLOCK + 32 * step + 16 * (i % 2) + 4 * (LANES % 4) + i // 2
                    matrix[features.start + row, feature] = entries[:, i]
    return matrix


def _tiles(weight: Int4Weight) -> Iterator[tuple[int, int, slice]]:
    for block in range(weight.in_features // BLOCK):
        for tile in range(weight.out_features // TILE):
            yield block, tile, slice(tile * TILE, (tile + 1) * TILE)


def _raw(weight: Int4Weight, block: int, tile: int) -> torch.Tensor:
    """[2, lanes, 4] packed, as lanes load 16 bytes each."""
    return weight.packed[block, tile].view(torch.int32).view(2, 32, 4).long() & 0xFFFFFFFF


def _packed_scales(weight: Int4Weight, block: int, tile: int) -> torch.Tensor:
    """int64 [16, groups of a block]."""
    place = 0 if weight.scales.shape[0] == 1 else block
    return weight.scales[place, tile * TILE : (tile + 1) * TILE].long() & 0xFFFFFFFF


def _half(packed: torch.Tensor) -> torch.Tensor:
    return int4_emulator.fp16_of(packed).float()


def _finish(sums: torch.Tensor, rows: Fp8Rows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight.zeros is not None
    y = sums * rows.scales * weight.zeros
    return (y if bias is None else y + bias.float()).to(rows.dtype)
