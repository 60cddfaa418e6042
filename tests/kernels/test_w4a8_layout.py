"""4-bit weights in their order for FP8 rows: nothing is lost; what both kernels compute of them is the product."""

from __future__ import annotations

import pytest
import torch
import w4a8_emulator
from hopper import CLUSTERS_AT_ONCE
from slipstream_kernels import ops
from slipstream_kernels.fp8 import Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm import w4a8_layout
from slipstream_kernels.gemm.cuda.mixed_gemm_w4a8_choice import Variant, choose, most_tokens
from slipstream_kernels.integer import Int4Weight


def weight_of(out_features: int, in_features: int, group_size: int, has_zeros: bool) -> Int4Weight:
    groups = (out_features, in_features // group_size)
    packed = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8)
    scales = ((0.02 + torch.rand(groups)) * in_features**-0.5 / 4).bfloat16().float()
    zeros = torch.randint(17, groups, dtype=torch.uint8) if has_zeros else None
    return Int4Weight(packed, scales, zeros, group_size, out_features, in_features)


def rows_of(num_tokens: int, weight: Int4Weight) -> Fp8Rows:
    scheme = Fp8Scheme(sum_columns=64 if weight.group_size == 64 else 128)
    return ops.quantize_fp8(torch.randn(num_tokens, weight.in_features).bfloat16() + 0.2, scheme)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [64, 128, 384])
def test_weights_of_checkpoints_are_kept(group_size: int, has_zeros: bool) -> None:
    weight = weight_of(64, 384, group_size, has_zeros)
    repacked = w4a8_layout.repack(weight)
    kept = w4a8_layout.canonical(repacked)
    assert repacked.is_for_fp8_rows and repacked.packed.nbytes == weight.packed.nbytes
    assert torch.equal(kept.packed, weight.packed) and torch.equal(kept.scales, weight.scales)
    assert torch.equal(kept.zeros, torch.full_like(kept.zeros, 8) if weight.zeros is None else weight.zeros)
    found = ops.int4_weight(repacked.packed, repacked.scales, repacked.zeros, group_size, 384)
    assert (found.out_features, found.is_for_fp8_rows) == (64, True)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [64, 128, 256])
def test_emulated_products_are_near_the_reference(group_size: int, has_zeros: bool) -> None:
    weight = weight_of(32, 256, group_size, has_zeros)
    rows, bias = rows_of(5, weight), torch.randn(32).bfloat16() if has_zeros else None
    expected = ops.int4_mm(rows, weight, bias, backend="reference").float()
    repacked = w4a8_layout.repack(weight)
    few, many = (
        (multiply(rows, repacked, bias).float() - expected).norm() / expected.norm()
        for multiply in (w4a8_emulator.few_rows, w4a8_emulator.many_rows)
    )
    # Few: what differs is the order of fp32 sums. Many: (code - zero) * scale, to e4m3, costs 2 to 3 %; codes of whole
    # rows are exact up to 16.
    assert few < 0.003 and many < (0.004 if group_size == 256 else 0.035)


@pytest.mark.parametrize(
    "sizes",
    [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672), (16, 128), (128256, 4096)],
)
def test_what_is_chosen_can_run(sizes: tuple[int, int]) -> None:
    def at_once(variant: Variant) -> int:
        return CLUSTERS_AT_ONCE[variant.splits]

    for num_tokens in (0, 1, 8, 9, 17, 33, 49, 64):
        variant = choose(num_tokens, sizes, at_once)
        assert variant is not None
        parts, blocks = min(CLUSTERS_AT_ONCE[variant.splits], sizes[0] // 16), sizes[1] // 128
        in_one_pass = sizes[0] // 16 <= parts * 4 * variant.warpgroups_m
        assert variant.columns >= num_tokens and variant.splits <= blocks
        assert in_one_pass or (variant.warpgroups_m == 4 and variant.splits == 1)


@pytest.mark.parametrize("sizes", [(4096, 4096), (6144, 4096), (4096, 14336), (5120, 13696), (16, 128)])
def test_more_rows_go_where_outputs_are_narrow(sizes: tuple[int, int]) -> None:
    def at_once(variant: Variant) -> int:
        return CLUSTERS_AT_ONCE[variant.splits]

    for num_tokens in (65, 96, 97, 128):
        variant = choose(num_tokens, sizes, at_once)
        assert variant is not None and variant.columns >= num_tokens and variant.warpgroups_m <= 2
        assert sizes[0] // 16 <= CLUSTERS_AT_ONCE[variant.splits] * 4 * variant.warpgroups_m
        assert choose(num_tokens, (28672, 4096), at_once) is None
        assert choose(num_tokens, sizes, lambda _: 0) is None


@pytest.mark.parametrize("sizes", [(4096, 14336), (3584, 18944), (2048, 8192), (16, 128)])
def test_up_to_256_rows_go_where_outputs_are_narrow_and_sums_long(sizes: tuple[int, int]) -> None:
    """Two tiles of 128 tokens: each has half of the clusters."""

    def at_once(variant: Variant) -> int:
        return CLUSTERS_AT_ONCE[variant.splits]

    for num_tokens in (129, 200, 256):
        variant = choose(num_tokens, sizes, at_once)
        if sizes[1] // 128 < 2:
            assert variant is None  # too few features for a cluster
            continue
        assert variant is not None and (variant.columns, variant.token_tiles) == (128, 2)
        assert sizes[0] // 16 <= CLUSTERS_AT_ONCE[variant.splits] // 2 * 4 * variant.warpgroups_m
        for other in ((4096, 4096), (5120, 13824), (28672, 4096)):
            assert choose(num_tokens, other, at_once) is None
    assert choose(257, sizes, at_once) is None


@pytest.mark.parametrize("sizes", [(28672, 4096), (8192, 4096), (4096, 4096), (4096, 14336), (16, 128)])
def test_rows_bring_sums_for_as_many_as_are_multiplied_by_them(sizes: tuple[int, int]) -> None:
    """A kernel that quantises them makes no sums that no product takes."""

    def at_once(variant: Variant) -> int:
        return CLUSTERS_AT_ONCE[variant.splits]

    most = most_tokens(sizes)
    assert choose(most, sizes, at_once) is not None or sizes == (16, 128)
    assert choose(most + 1, sizes, at_once) is None


def test_rows_and_weights_of_different_kinds_are_refused() -> None:
    weight = weight_of(32, 256, 128, True)
    with pytest.raises(ValueError, match="weight: repacked for FP8 rows"):
        ops.int4_mm(torch.zeros(1, 256).bfloat16(), w4a8_layout.repack(weight))
    with pytest.raises(ValueError, match="weight: repacked for FP8 rows"):
        ops.int4_mm(rows_of(1, weight), w4a8_layout.repack(weight), backend="reference")
    assert ops.activation_sum_columns(weight) == 0 and ops.repack_int4(weight, for_fp8_rows=True) is weight
