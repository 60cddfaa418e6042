"""Products of many rows with 4-bit integers of experts, on warpgroups: against fp64, thread by thread, on a GPU."""

from __future__ import annotations

import emulation
import pytest
import torch
from expert_cases import check, int4_of, logits_of
from hopper import assert_compiles_well
from slipstream_kernels import ops
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.moe.cuda import grouped_gemm, grouped_w4a16_wide
from slipstream_kernels.ops import Routing
from tolerances import EXPANDED_INT4, INT_MM

VARIANTS, BF16 = grouped_w4a16_wide.VARIANTS, torch.bfloat16
# tokens, experts, top_k, out, in, group: a pair of blocks and a half, features that end within a warpgroup's, experts
# of several tiles, of one row and of none, groups of 64 and of whole rows
SHAPES = [
    (20, 3, 2, 160, 384, 128), (57, 3, 2, 96, 640, 64), (9, 40, 2, 64, 128, 128), (120, 3, 2, 32, 256, 256),
    (40, 2, 1, 192, 1152, 1152),
]  # fmt: skip


def case(
    shape: tuple[int, ...], by_token: bool, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Int4Weight, torch.Tensor, Routing]:
    """(rows of x, canonical weight, its numbers of each expert, routing)"""
    torch.manual_seed(sum(shape))
    num_tokens, num_experts, top_k, out_features, in_features, group_size = shape
    routing = ops.route_experts(logits_of(num_tokens, num_experts, device), top_k)
    weight = int4_of(num_experts * out_features, in_features, group_size, by_token, device)
    exact = ops.dequantize_int4(weight).double().view(num_experts, out_features, in_features)
    x = torch.randn(num_tokens if by_token else routing.num_rows, in_features, device=device).to(dtype)
    return x, weight, exact, routing


def limits(dtype: torch.dtype) -> tuple[float, float]:
    return EXPANDED_INT4 if dtype == BF16 else INT_MM["cuda", BF16]


@pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
@pytest.mark.parametrize("dtype", grouped_w4a16_wide.DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thread_by_thread(shape, variant, dtype) -> None:
    """Its device code on the CPU, the permutation of rows before it too."""
    by_token = shape[0] != 57
    x, weight, exact, routing = case(shape, by_token, dtype, torch.device("cpu"))
    repacked = int4_layout.repack_experts(weight)
    out = torch.full((routing.num_rows, shape[3]), float("nan"), dtype=dtype)
    kernel = grouped_w4a16_wide.kernel_of(x, repacked, routing, False, variant)
    params, workspaces = grouped_gemm.arguments(x, repacked, routing, kernel, out, by_token=by_token)
    workspaces[0].fill_(0xFF)  # NaN
    emulation.run("emulate_grouped_wide.cc", kernel.defines, params, seed=sum(shape))
    check(out, x.double(), exact, routing, by_token, False, limits(dtype))


@pytest.mark.parametrize("defines", grouped_w4a16_wide.variants(), ids=" ".join)
def test_compiles_without_spills(defines) -> None:
    assert_compiles_well(grouped_w4a16_wide.SOURCE, defines)


@pytest.mark.parametrize("dtype", grouped_w4a16_wide.DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 8, 2, 576, 1408, 128), (700, 5, 4, 96, 512, 64)], ids=str)
def test_on_a_gpu(hopper, shape, gated, variant, dtype) -> None:
    x, canonical, exact, routing = case(shape, gated, dtype, hopper)
    weight = ops.repack_expert_int4(canonical, shape[1])
    assert weight.is_repacked
    y = grouped_w4a16_wide.grouped_int4_mm(x, weight, routing, gated, gated, variant)
    check(y, x.double(), exact, routing, gated, gated, limits(dtype))
    assert torch.equal(y, grouped_w4a16_wide.grouped_int4_mm(x, weight, routing, gated, gated, variant))


def test_tiles_hold_the_rows_of_most_experts() -> None:
    chosen = [grouped_w4a16_wide.choose((rows, rows, 8), 0, 0).tile_rows for rows in (8, 200, 300, 400, 4096)]
    assert chosen == [32, 32, 48, 64, 64]


def test_fp8_rows_are_refused(device) -> None:
    x, weight, _, routing = case(SHAPES[0], True, BF16, device)
    with pytest.raises(ValueError, match="rows are e4m3"):
        grouped_w4a16_wide.grouped_int4_mm(ops.quantize_fp8(x), weight, routing, True, False)
