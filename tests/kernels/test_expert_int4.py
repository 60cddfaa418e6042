"""Products with the 4-bit weights of experts: right against fp64 whatever the routing, in every layout and variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import check, int4_of, logits_of, rows_of
from hopper import assert_compiles_well, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.moe import grouped_w4a8_layout
from slipstream_kernels.moe.cuda import grouped_w4a8_gemm, grouped_w4a16_gemm
from slipstream_kernels.moe.kernels import KERNELS, Call
from slipstream_kernels.moe.triton.dequantise_w4a8 import dequantise_w4a8
from slipstream_kernels.moe.triton.dequantise_w4a16 import dequantise_w4a16
from tolerances import INT_MM

BACKENDS = ["reference", "triton"]
# tokens, experts, top_k, out, in
SHAPES = [(1, 8, 2, 32, 64), (9, 3, 2, 80, 192), (40, 2, 1, 16, 128)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize(("by_token", "gated", "group_size"), [(True, True, 64), (False, False, 32)])
@pytest.mark.parametrize("shape", SHAPES)
def test_grouped_int4_mm(device, backend, kind, by_token, gated, group_size, shape) -> None:
    num_tokens, num_experts, top_k, out_features, in_features = shape
    routing = ops.route_experts(logits_of(num_tokens, num_experts, device), top_k)
    num_rows = num_tokens if by_token else routing.num_rows
    x, exact_x = rows_of(kind, num_rows, in_features, torch.bfloat16, device)
    weight = int4_of(num_experts * out_features, in_features, group_size, gated, device)
    exact_w = ops.dequantize_int4(weight).double().view(num_experts, out_features, in_features)
    y = ops.grouped_int4_mm(x, weight, routing, by_token=by_token, gated=gated, backend=backend)
    check(y, exact_x, exact_w, routing, by_token, gated, INT_MM[torch.device(device).type, torch.bfloat16])


# tokens, experts, top_k, out, in, group: shares that cross experts, short passes, experts of many tiles, odd blocks
CUDA_SHAPES = [
    (1, 4, 2, 64, 128, 128), (4, 8, 2, 256, 512, 128), (7, 3, 1, 96, 384, 64), (100, 5, 2, 512, 1408, 128),
    (64, 8, 2, 1024, 2048, 64), (300, 4, 2, 160, 640, 640), (33, 40, 4, 2816, 2048, 128), (16, 300, 8, 64, 256, 128),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize(("by_token", "gated"), [(True, True), (False, False)])
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_repacked_weights_of_experts(kind, by_token, gated, shape) -> None:
    num_tokens, num_experts, top_k, out_features, in_features, group_size = shape
    device, dtype = torch.device("cuda"), torch.float16 if kind == "fp16" else torch.bfloat16
    routing = ops.route_experts(logits_of(num_tokens, num_experts, device), top_k)
    x, exact_x = rows_of(kind, num_tokens if by_token else routing.num_rows, in_features, dtype, device)
    weight = int4_of(num_experts * out_features, in_features, group_size, gated, device)
    exact_w = ops.dequantize_int4(weight).double().view(num_experts, out_features, in_features)
    repacked = ops.repack_expert_int4(weight, num_experts)
    assert repacked.is_repacked and repacked.packed.nbytes == weight.packed.nbytes
    y = ops.grouped_int4_mm(x, repacked, routing, by_token=by_token, gated=gated, backend="cuda")
    assert y.dtype == dtype
    check(y, exact_x, exact_w, routing, by_token, gated, INT_MM["cuda", torch.bfloat16])


# as above: one tile, CTAs with few tiles, blocks that are no multiple of a stage or of eight, experts without rows
W4A8_SHAPES = [
    (9, 3, 1, 32, 128, 128), (1, 5, 2, 352, 640, 128), (7, 8, 2, 1024, 1152, 128), (60, 5, 2, 352, 640, 640),
    (300, 8, 2, 1024, 1152, 128), (33, 40, 4, 704, 512, 128), (16, 300, 8, 64, 256, 128), (2, 4, 2, 4096, 1408, 128),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("variant", grouped_w4a8_gemm.VARIANTS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", W4A8_SHAPES, ids=str)
def test_prepacked_tiles(variant, gated, shape) -> None:
    """Every variant, whatever the routing: the last expert has no rows, another many; twice gives the same."""
    num_tokens, num_experts, top_k, out_features, in_features, group_size = shape
    device = torch.device("cuda")
    logits = logits_of(num_tokens, num_experts, device)
    logits[:, 0] += 3
    routing = ops.route_experts(logits, top_k)
    by_token = gated
    x, exact_x = rows_of("fp8", num_tokens if by_token else routing.num_rows, in_features, torch.bfloat16, device)
    weight = int4_of(num_experts * out_features, in_features, group_size, gated, device)
    exact_w = ops.dequantize_int4(weight).double().view(num_experts, out_features, in_features)
    repacked = ops.repack_expert_int4(weight, num_experts, fp8_rows=True)
    assert repacked.is_grouped_w4a8 and repacked.out_features == weight.out_features
    y = grouped_w4a8_gemm.grouped_int4_mm(x, repacked, routing, by_token, gated, variant)
    check(y, exact_x, exact_w, routing, by_token, gated, INT_MM["cuda", torch.bfloat16])
    again = grouped_w4a8_gemm.grouped_int4_mm(x, repacked, routing, by_token, gated, variant)
    assert torch.equal(y, again)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 20, 50, 100, 1100])
def test_the_op_takes_prepacked_tiles(num_tokens, kind, dtype) -> None:
    """Of 16-bit rows, what ops.quantize_fp8 makes of them, to the bit."""
    device = torch.device("cuda")
    routing = ops.route_experts(logits_of(num_tokens, 4, device), 2)
    plain = torch.randn(num_tokens, 512, device=device).to(dtype)
    plain[0] = 0
    rows = ops.quantize_fp8(plain)
    x, exact_x = rows if kind == "fp8" else plain, rows.values.double() * rows.scales.double()
    weight = int4_of(4 * 256, 512, 128, True, device)
    exact_w = ops.dequantize_int4(weight).double().view(4, 256, 512)
    repacked = ops.repack_expert_int4(weight, 4, fp8_rows=True)
    y = ops.grouped_int4_mm(x, repacked, routing, by_token=True, gated=True)
    many = num_tokens > 1000 and dtype == torch.bfloat16  # weights are rounded too: 2.6 % of the spread
    check(y, exact_x, exact_w, routing, True, True, (1e-2, 0.15) if many else INT_MM["cuda", torch.bfloat16])
    assert torch.equal(y, ops.grouped_int4_mm(rows, repacked, routing, by_token=True, gated=True))
    with pytest.raises(ValueError, match=r"x: dtype torch\.float32"):
        ops.grouped_int4_mm(plain.float(), repacked, routing, by_token=True)


@needs_hopper
@pytest.mark.parametrize("fp8_rows", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_fp8_rows_of_many_tokens_go_through_fp8_weights(gated, fp8_rows) -> None:
    device = torch.device("cuda")
    routing = ops.route_experts(logits_of(1100, 4, device), 2)
    x, exact_x = rows_of("fp8", 1100 if gated else 2200, 512, torch.bfloat16, device)
    weight = int4_of(4 * 256, 512, 128, True, device)
    exact_w = ops.dequantize_int4(weight).double().view(4, 256, 512)
    repacked = ops.repack_expert_int4(weight, 4, fp8_rows=fp8_rows)
    y = ops.grouped_int4_mm(x, repacked, routing, by_token=gated, gated=gated)
    check(
        y, exact_x, exact_w, routing, gated, gated, (1e-2, 0.15)
    )  # 2.6 % of the spread, of which five times may occur


@needs_hopper
def test_what_the_kernel_does_not_serve() -> None:
    device = torch.device("cuda")
    routing = ops.route_experts(logits_of(9, 4, device), 2)
    for rows, size, group in ((4 * 80, 256, 128), (4 * 64, 192, 64), (4 * 64, 256, 32)):
        assert not ops.repack_expert_int4(int4_of(rows, size, group, False, device), 4).is_repacked
    repacked = ops.repack_expert_int4(int4_of(4 * 64, 256, 128, False, device), 4)
    x = torch.randn(9, 256, device=device)
    with pytest.raises(ValueError, match=r"x: dtype torch.float32"):
        ops.grouped_int4_mm(x, repacked, routing, by_token=True)
    with pytest.raises(ValueError, match="backend: 'triton' takes a canonical weight"):
        ops.grouped_int4_mm(x.bfloat16(), repacked, routing, by_token=True, backend="triton")


@pytest.mark.parametrize(("blocks", "group_size"), [(3, 128), (1, 64), (5, 640), (2, 64)])
def test_experts_weights_as_fp8(device, blocks, group_size) -> None:
    """Half a step of e4m3, 2^-4, from the numbers that the codes stand for."""
    weight = int4_of(48, 128 * blocks, group_size, True, device)
    repacked = int4_layout.repack_experts(weight)
    assert repacked.zeros is not None
    y, expected = dequantise_w4a16(repacked, E4M3).float() * repacked.zeros[:, None], ops.dequantize_int4(weight)
    assert ((y - expected).abs() <= 1.01 * 2**-4 * expected.abs()).all()


def half_scales(weight: ops.Int4Weight) -> ops.Int4Weight:
    """With scales as checkpoints store them, which the prepacked form holds exactly."""
    return replace(weight, scales=weight.scales.half().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("blocks", "group_size"), [(3, 128), (1, 64), (1, 128), (5, 640), (2, 64)])
def test_experts_weights_in_16_bits_are_the_reference(device, blocks, group_size, has_zeros, dtype) -> None:
    weight = half_scales(int4_of(48, 128 * blocks, group_size, has_zeros, device))
    written = dequantise_w4a16(int4_layout.repack_experts(weight), dtype)
    assert torch.equal(written, ops.dequantize_int4(weight).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("by_token", "gated"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("kernel", "in_features", "group_size"),
    [("dequantise_w4a16_16bit+grouped_mm", 384, 128), ("dequantise_w4a16_16bit+grouped_mm", 128, 64),
     ("dequantise_int4_16bit+grouped_mm", 1344, 32), ("dequantise_int4_16bit+grouped_mm", 192, 64)],
)  # fmt: skip
def test_many_rows_of_experts_go_through_16_bit_weights(
    device, kernel, in_features, group_size, by_token, gated, dtype
) -> None:
    """Three experts, the last without rows: to the bit what the product of the reference's weights gives."""
    routing = ops.route_experts(logits_of(40, 3, device), 2)
    x = torch.randn(40 if by_token else routing.num_rows, in_features, device=device).to(dtype)
    weight = half_scales(int4_of(3 * 64, in_features, group_size, True, device))
    held = weight if kernel.startswith("dequantise_int4") else int4_layout.repack_experts(weight)
    call = Call(x, ops.int4_linear_weight(held, num_experts=3), routing, by_token, gated)
    y = KERNELS[kernel].run(call, ())
    dense = ops.dequantize_int4(weight).view(3, 64, in_features)
    assert torch.equal(y, ops.grouped_mm(x, dense.to(dtype), routing, by_token=by_token, gated=gated))
    rounds_weights = INT_MM["cuda", torch.bfloat16]
    check(y, x.double(), dense.double(), routing, by_token, gated, rounds_weights)


@pytest.mark.parametrize(("blocks", "group_size"), [(3, 128), (2, 256)])
def test_prepacked_tiles_as_fp8(device, blocks, group_size) -> None:
    """The same for W4A8, whose tiles have 8 rows of either half of an expert's."""
    weight = int4_of(3 * 64, 128 * blocks, group_size, True, device)
    repacked = grouped_w4a8_layout.repack_experts(weight, 3)
    assert repacked.packed.shape == (blocks, 12, (1024 + 64) // 8) and repacked.is_grouped_w4a8
    held = ops.int4_weight(*repacked.tensors().values(), None, group_size, 128 * blocks)
    assert (held.out_features, held.zeros) == (192, None)
    y, expected = dequantise_w4a8(repacked, 3).float() * repacked.scales[:, None], ops.dequantize_int4(weight)
    assert ((y - expected).abs() <= 1.01 * 2**-4 * expected.abs()).all()


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_order_of_experts_weights(blocks) -> None:
    """Any run of tiles or rows of a pair of blocks lies together; a last block without a second follows."""
    weight = int4_of(48, 128 * blocks, 64, True, torch.device("cpu"))
    dense, experts = int4_layout.repack(weight), int4_layout.repack_experts(weight)
    position = 0
    for first in range(0, blocks, 2):
        for tile in range(3):
            run = dense.packed[tile, first : first + 2].flatten()
            assert torch.equal(experts.packed[position : position + run.numel()], run)
            position += run.numel()
    assert position == experts.packed.numel() == dense.packed.numel()
    by_row = torch.stack(list(dense.scales[0]), dim=1)  # [row, block, group]
    first_pair = by_row[:, :2].flatten()
    assert torch.equal(experts.scales[: first_pair.numel()], first_pair)
    assert torch.equal(
        experts.scales[-by_row[:, (blocks - 1) // 2 * 2 :].numel() :], by_row[:, (blocks - 1) // 2 * 2 :].flatten()
    )


def test_tiles_have_room_for_the_rows_of_most_experts() -> None:
    shapes = {
        (1, 8, 2): 2,
        (16, 8, 2): 2,
        (17, 8, 2): 2,
        (32, 8, 2): 2,
        (64, 8, 2): 6,
        (4096, 8, 2): 6,
        (128, 256, 8): 2,
    }
    for (num_tokens, num_experts, top_k), columns in shapes.items():
        routing = ops.route_experts(torch.zeros(num_tokens, num_experts), top_k)
        assert grouped_w4a16_gemm.choose(routing.sizes, 4096, 132) == (columns,)
        assert routing.max_tiles(8 * columns) >= -(-num_tokens // (8 * columns)) * top_k


def test_variants_of_w4a8() -> None:
    """Tiles by the rows of an expert; with few tiles a CTA, warpgroups divide the input features."""
    shapes = {
        (1, 8, 2, 4096): (16, 1),
        (2, 8, 2, 4096): (16, 2),
        (1, 8, 2, 28672): (16, 4),
        (8, 8, 2, 28672): (32, 4),
        (8, 8, 2, 4096): (16, 4),
        (64, 8, 2, 4096): (32, 4),
        (128, 8, 2, 4096): (48, 4),
        (4096, 8, 2, 4096): (64, 4),
    }
    for (num_tokens, num_experts, top_k, out_features), variant in shapes.items():
        routing = ops.route_experts(torch.zeros(num_tokens, num_experts), top_k)
        assert grouped_w4a8_gemm.choose(routing.sizes, out_features, 132) == variant


@pytest.mark.parametrize(
    ("source", "defines"),
    [
        (grouped_w4a16_gemm.SOURCE, grouped_w4a16_gemm.defines(torch.bfloat16, 2, 1, True)),
        (grouped_w4a8_gemm.SOURCE, grouped_w4a8_gemm.defines(32, True)),
    ],
)
def test_the_sources_compile_well(source, defines) -> None:
    assert_compiles_well(source, defines)
