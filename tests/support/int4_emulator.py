"""Emulates CUDA kernels of 4-bit weights on the CPU, instruction by instruction: bit-exact converters, sums in the
order of groups and CTAs.  CPU tests compare it with the reference, GPU tests compare the kernels with it."""

from __future__ import annotations

import torch
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.integer import Int4Weight

BLOCK = 128


def byte_perm(low: torch.Tensor, high: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """CUDA's __byte_perm on int64 tensors that hold 32-bit words; selectors without their sign bit."""
    both = low | (high << 32)
    out = torch.zeros_like(both + selector)
    for byte in range(4):
        index = (selector >> (4 * byte)) & 0xF
        assert (index < 8).all()
        out |= ((both >> (8 * index)) & 0xFF) << (8 * byte)
    return out


def fp16_of(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0xFFFF).to(torch.uint16).view(torch.float16)


def bf16_of(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0xFFFF).to(torch.uint16).view(torch.bfloat16)


def expand_fp16(word: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Int4Converter<__half>::expand of int4_converter.cuh: the eight q - zero of a word, nibble by nibble, as fp32."""
    low, high = 0xE400 + zero, 0xD400 + 16 * zero
    out = []
    for i in range(8):
        half = (word >> (16 * (i // 4))) >> (8 * (i % 4 // 2))
        if i % 2 == 0:
            out.append(fp16_of((half & 0x000F) | 0x6400) + fp16_of(low))
        else:
            exact = fp16_of((half & 0x00F0) | 0x6400).float() * fp16_of(torch.tensor(0x2C00)).float()
            out.append((exact + fp16_of(high).float()).half())
    return torch.stack(out, dim=-1).float()


def expand_bf16(word: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Int4Converter<__nv_bfloat16>::expand: the same in bf16."""
    low = bf16_of(0xC300 + zero)
    out = [bf16_of(((word >> (4 * i)) & 0xF) | 0x4300) + low for i in range(8)]
    return torch.stack(out, dim=-1).float()


def table_words(word: torch.Tensor) -> list[torch.Tensor]:
    """table_of of w4a8_mainloop.cuh: four words of four e4m3 numbers each."""
    scale, zero = fp16_of(word).float() / 512, fp16_of(word >> 16).float() * -512
    entries = torch.stack([(code - zero) * scale for code in range(16)], dim=-1).to(E4M3).view(torch.uint8).long()
    return [sum(entries[..., 4 * part + i] << (8 * i) for i in range(4)) for part in range(4)]


def look_up(word: torch.Tensor, table: list[torch.Tensor]) -> torch.Tensor:
    """The eight e4m3 numbers of a word, as the main loop's byte permutations find them; fp32 [..., 8]."""
    index, choice = word & 0x77777777, ((word & 0x88888888) | 0x64206420) >> 1
    out = []
    for shift in (0, 16):
        low = byte_perm(table[0], table[1], (index >> shift) & 0xFFFF)
        high = byte_perm(table[2], table[3], (index >> shift) & 0xFFFF)
        four = byte_perm(low, high, (choice >> shift) & 0xFFFF)
        out += [((four >> (8 * i)) & 0xFF).to(torch.uint8).view(E4M3).float() for i in range(4)]
    return torch.stack(out, dim=-1)


def packed_qweight(weight: Int4Weight) -> torch.Tensor:
    """A repacked weight's 32-bit words [tiles of 16, blocks, 4 x 32 columns, lane, row half] as int64."""
    tiles, blocks = weight.packed.shape[:2]
    return weight.packed.view(tiles, blocks, 4, 32, 2).long() & 0xFFFFFFFF


def in_rows(values: torch.Tensor) -> torch.Tensor:
    """Values of packed_qweight, [.., 8 nibbles], back in rows and columns: [out_features, in_features]."""
    tiles, blocks = values.shape[:2]
    axes = values.view(tiles, blocks, 4, 8, 4, 2, 2, 4)  # c32, row, c4, r8, c16, c
    return axes.permute(0, 5, 3, 1, 2, 6, 4, 7).reshape(16 * tiles, 128 * blocks)


def packed_scales(weight: Int4Weight) -> torch.Tensor:
    """The packed scale of each row and column of 32, in the order of packed_qweight: [.., lane, row half]."""
    rows = weight.scales[0].transpose(0, 1).flatten(1).long() & 0xFFFFFFFF
    columns = rows.repeat_interleave(weight.in_features // 32 // rows.shape[1], dim=1)
    tiles, blocks = weight.packed.shape[:2]
    axes = columns.view(tiles, 2, 8, blocks, 4).permute(0, 3, 4, 2, 1)  # tile, block, c32, row, r8
    return axes[..., :, None, :].expand(-1, -1, -1, -1, 4, -1).flatten(3, 4)


def converted_operand(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """code - zero of each weight, [out_features, in_features] fp32, as the converter of `dtype` makes it."""
    expand = expand_bf16 if dtype == torch.bfloat16 else expand_fp16
    return in_rows(expand(packed_qweight(weight), packed_scales(weight) >> 16))


def scaled_operand(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """ScaledInt4Converter of int4_converter.cuh: the same times the group's scale, both in `dtype`, rounded once."""
    scale = fp16_of(packed_scales(weight)).to(dtype)[..., None].expand(*packed_qweight(weight).shape, 8)
    return (converted_operand(weight, dtype).to(dtype) * in_rows(scale.float()).to(dtype)).float()


def rows(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """skinny_gemm_w4a16: sums of half a block in fp32, times the group's scale, added to the sums of 8 warps."""
    values, operand = x.float(), converted_operand(weight, x.dtype)
    scales = _relative_scales(weight)
    warps = torch.zeros(8, values.shape[0], weight.out_features)
    for start in range(0, weight.in_features, BLOCK // 2):
        part = values[:, start : start + BLOCK // 2] @ operand[:, start : start + BLOCK // 2].t()
        warps[start // BLOCK % 8] += part * scales[:, start * scales.shape[1] // weight.in_features]
    return _finish(warps.sum(0), x, weight, bias)


def mixed(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """mixed_gemm over W4A16: fp32 sums of operands that are rounded once after they are scaled."""
    return _finish(x.float() @ scaled_operand(weight, x.dtype).t(), x, weight, bias)


def _relative_scales(weight: Int4Weight) -> torch.Tensor:
    assert weight.zeros is not None
    return int4_layout.unpack_scales(weight.scales, torch.ones_like(weight.zeros))[0]


def _finish(sums: torch.Tensor, x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight.zeros is not None
    y = sums * weight.zeros
    return (y if bias is None else y + bias.float()).to(x.dtype)


def pair_neighbours(word: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """pair_neighbours of int4_converter.cuh: nibbles 2 i and 2 i + 1 as halves of pair i, with `bits` above each."""
    selectors = [torch.tensor(i | (4 + i) << 8) for i in range(4)]
    return [(byte_perm(word, word >> 4, selector) & 0x000F000F) | bits << 16 | bits for selector in selectors]
