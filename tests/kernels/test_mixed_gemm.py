"""int8 and 4-bit weights as register operands of products of 16-bit rows: what lanes hold, and every variant on a GPU.

Also: which one is chosen.  4-bit weights beside FP8 rows: test_w4a8_cuda.py.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from hopper import CLUSTERS_AT_ONCE, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.gemm import int4_layout, int8_layout
from slipstream_kernels.gemm.cuda import mixed_gemm, mixed_gemm_w4a16
from slipstream_kernels.gemm.cuda.mixed_gemm import Variant
from slipstream_kernels.gemm.tuning import H200
from slipstream_kernels.integer import Int4Weight

LANES = torch.arange(32)
SIZES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672), (16, 128), (48, 256)]


def pair(word: torch.Tensor) -> torch.Tensor:
    """As Bytes<__nv_bfloat16> makes it: fp32 [lanes, 2]."""

    def halves(bits: torch.Tensor) -> torch.Tensor:
        return torch.stack([(bits >> 16 * i & 0xFFFF).to(torch.int16) for i in range(2)], 1).view(torch.bfloat16)

    return halves((word & 0x007F007F) | 0x43004300).float() + halves((word & 0x00800080) | 0xC300C300).float()


def test_registers_hold_the_weights_numbers() -> None:
    """Lane by lane: matrices as ldmatrix gives them, then registers of m64n..k16 products (PTX ISA, wgmma)."""
    values = torch.stack([torch.arange(-128, 128).roll(7 * i) for i in range(16)]).to(torch.int8)
    words = int8_layout.repack(values).long() & 0xFFFFFFFF
    found = torch.full((16, 256), float("nan"))
    for step in range(16):  # of 16 columns
        for low in range(2):  # rows 8-15
            row, word = LANES // 4 + 8 * low, words[LANES // 4 + 8 * low, 4 * step + LANES % 4]
            for high, of_lanes in enumerate((pair(word), pair(word >> 8))):  # columns 8-15
                for e in range(2):
                    found[row, 16 * step + 8 * high + 2 * (LANES % 4) + e] = of_lanes[:, e]
    assert torch.equal(found, values.float())


def test_nibbles_and_permuted_tokens_meet() -> None:
    """W4A16: a lane's nibbles become pairs of operands; permute_features of mixed_gemm_load.cuh orders tokens alike."""
    codes = torch.randint(16, (16, 128), dtype=torch.uint8)
    words = int4_layout.pack_qweight(codes[:, 0::2] | codes[:, 1::2] << 4).view(4, 32, 2).long() & 0xFFFFFFFF
    found = torch.full((16, 128), -1)  # by row of weights and place in the products' order of features
    for phase, half, i, e in product(range(4), range(2), range(4), range(2)):  # e: of the pair in register 2 i + half
        column = 32 * phase + 16 * (i // 2) + 8 * (i % 2) + 2 * (LANES % 4) + e
        found[LANES // 4 + 8 * half, column] = words[phase, :, half] >> 4 * (i + 4 * e) & 15
    permuted = torch.empty_like(codes)
    for start, j, q, h in product(range(0, 128, 32), range(4), range(4), range(2)):
        permuted[:, start + 8 * j + 2 * q + h] = codes[:, start + 16 * h + 4 * q + j]
    assert torch.equal(found, permuted.long())


def int4_weight(size: tuple[int, int], group_size: int, device: str) -> Int4Weight:
    """group_size: 0: whole rows."""
    groups = (size[0], size[1] // (group_size or size[1]))
    packed = torch.randint(256, (size[0], size[1] // 2), dtype=torch.uint8, device=device)
    scales = ((0.5 + torch.rand(groups, device=device)) * size[1] ** -0.5 / 4).bfloat16().float()
    zeros = torch.randint(17, groups, dtype=torch.uint8, device=device)
    return Int4Weight(packed, scales, zeros, group_size or size[1], *size)


def int4_operands(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[16, 128] in the products' order of features, of a tile's block, as W4A16Sums makes them of a lane's words."""
    mask, bits = 0x000F000F, 0x43004300 if dtype == torch.bfloat16 else 0  # Int4Codes::pair
    found = torch.full((16, 128), float("nan"), dtype=torch.float64)
    lanes = words.view(4, 32, 2).long() & 0xFFFFFFFF
    for phase, half, i, e in product(range(4), range(2), range(4), range(2)):
        pairs = (lanes[phase, :, half] >> 4 * i & mask) | bits
        column = 32 * phase + 16 * (i // 2) + 8 * (i % 2) + 2 * (LANES % 4) + e
        found[LANES // 4 + 8 * half, column] = (pairs >> 16 * e & 0xFFFF).to(torch.int16).view(dtype).double()
    return found


def row_scales(words: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """W4A16Sums::row_scale of packed words: fp32 (scale, bias)."""
    scale = (words & 0xFFFF).to(torch.int16).view(torch.float16).float()
    bias = (((words.long() & 0xFFFF0000) | 0xC3000000) - (1 << 32)).to(torch.int32).view(torch.float32)
    return (scale, bias) if dtype == torch.bfloat16 else (scale * 2.0**24, (bias + 128.0) * 2.0**-24)


def truncated(values: torch.Tensor) -> torch.Tensor:
    """fp64 cut to the bits of fp32, which is how a tensor core may add."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2.0**24).trunc() * 2.0**-24, exponent)


def permuted(x: torch.Tensor) -> torch.Tensor:
    """As permute_features orders features."""
    return x.unflatten(1, (-1, 2, 4, 4)).permute(0, 1, 4, 3, 2).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [64, 128, 0])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_scaled_sums_are_as_good_as_products_of_the_weights(mean: float, group_size: int, dtype: torch.dtype) -> None:
    """Codes with a constant added lose nothing that 16 bits would show, nor where activations have a mean."""
    weight = int4_weight((16, 1024), group_size, "cpu")
    repacked = int4_layout.repack(weight)
    assert repacked.zeros is not None
    x = (torch.randn(24, 1024) + mean).to(dtype)
    width = 64 if group_size == 64 else 128
    rows, activation_sums = permuted(x.double()), x.float().unflatten(1, (-1, width)).sum(2)
    sums = torch.zeros(16, 24)
    for group in range(1024 // width):
        block, start = group * width // 128, group * width % 128
        operands = int4_operands(repacked.packed[0, block], dtype)[:, start : start + width]
        parts = torch.zeros(16, 24, dtype=torch.float64)
        for step in range(0, width, 16):
            tokens = rows[:, 128 * block + start + step :][:, :16]
            parts = truncated(parts + operands[:, step : step + 16] @ tokens.t())
        scale, bias = row_scales(repacked.scales[0, min(block, repacked.scales.shape[1] - 1), :, start // width], dtype)
        sums += scale[:, None] * (parts.float() + bias[:, None] * activation_sums[:, group])
    y = sums.double().t() * repacked.zeros.double()
    expected = x.double() @ ops.dequantize_int4(weight).double().t()
    # A tenth of what rounding the result costs.
    assert (y - expected).norm() / expected.norm() < 0.1 * torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("size", SIZES)
def test_what_is_chosen_can_run(size: tuple[int, int]) -> None:
    def at_once(variant: Variant) -> int:
        return CLUSTERS_AT_ONCE[variant.splits]

    for num_tokens in (9, 17, 64, 65, 96, 128, 129, 192, 193, 256):
        variant = mixed_gemm.choose(num_tokens, size, at_once)
        assert variant in list(mixed_gemm.candidates(num_tokens, size, at_once))
        assert variant.columns * variant.token_tiles >= num_tokens


@pytest.mark.parametrize("size", SIZES)
def test_what_is_chosen_of_4_bits_can_run(size: tuple[int, int]) -> None:
    def at_once(variant: Variant) -> int:
        return CLUSTERS_AT_ONCE[variant.splits]

    for num_tokens in (17, 32, 33, 48, 49, 64, 65, 96, 128, 129, 192, 193, 256, 257, 384, 512, 1000, 1024):
        variant = mixed_gemm_w4a16.choose(num_tokens, size, at_once)
        small = next(numbers for most, numbers in H200.small_weights.items() if num_tokens <= most)
        if variant is None:
            assert size[0] * size[1] <= small  # weights are written out
            continue
        assert size[0] * size[1] > small and variant in list(mixed_gemm_w4a16.candidates(num_tokens, size, at_once))
        assert variant.columns in mixed_gemm_w4a16.COLUMNS and variant.columns * variant.token_tiles >= num_tokens


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(592, 1152), (2304, 2048), (96, 128), (36864, 256)])
def test_every_variant_multiplies(size: tuple[int, int], dtype: torch.dtype) -> None:
    values = torch.randint(-128, 128, size, dtype=torch.int8, device="cuda")
    scales = (0.5 + torch.rand(size[0], device="cuda")) * size[1] ** -0.5 / 64
    words, bias = int8_layout.repack(values), torch.randn(size[0], device="cuda").to(dtype)
    for num_tokens in (1, 16, 17, 33, 48, 64, 65, 128, 150, 256):
        x = torch.randn(num_tokens, size[1], device="cuda").to(dtype)
        y = x.double() @ (values.double() * scales.double()[:, None]).t() + bias.double()
        gate, up = y.chunk(2, dim=1)
        gated_y = torch.nn.functional.silu(gate) * up
        at_once = partial(mixed_gemm.clusters_at_once, x.device, mixed_gemm.format_of(dtype))
        for gated, variant in product((False, True), mixed_gemm.candidates(num_tokens, size, at_once)):
            expected = gated_y if gated else y
            if gated and size[0] % 32:
                continue
            out = torch.full(expected.shape, float("nan"), dtype=dtype, device="cuda")
            mixed_gemm.mixed_gemm(x, words, scales, bias, gated, variant, out)
            assert (out.double() - expected).norm() / expected.norm() < 6e-3, (num_tokens, gated, variant)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [64, 128, 0])
@pytest.mark.parametrize("size", [(592, 1152), (2304, 2048), (96, 128), (36864, 256), (4096, 14336)])
def test_every_variant_multiplies_4_bits(size: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    canonical = int4_weight(size, group_size, "cuda")
    weight, dense = int4_layout.repack(canonical), ops.dequantize_int4(canonical).double()
    bias, groups = torch.randn(size[0], device="cuda").to(dtype), 2 if group_size == 64 else 1
    for num_tokens in (17, 33, 48, 64, 65, 128, 150, 256, 400, 1000):
        x = torch.randn(num_tokens, size[1] + 8, device="cuda").to(dtype)[:, : size[1]]  # rows that are not dense
        expected = x.double() @ dense.t() + bias.double()
        at_once = partial(mixed_gemm.clusters_at_once, x.device, mixed_gemm_w4a16.format_of(dtype, groups))
        for variant in mixed_gemm_w4a16.candidates(num_tokens, size, at_once):
            out = torch.full(expected.shape, float("nan"), dtype=dtype, device="cuda")
            mixed_gemm_w4a16.mixed_gemm_w4a16(x, weight, bias, out, variant)
            # Operands of large tiles are rounded once after they are scaled.
            error = (out.double() - expected).norm() / expected.norm()
            assert error < (5e-3 if dtype == torch.bfloat16 else 3e-3), (num_tokens, variant)
