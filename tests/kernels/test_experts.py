"""Routing and grouped products: right against fp64 expert by expert, whatever the routing; wrong operands are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper import needs_hopper
from slipstream_kernels import int4_layout, ops
from slipstream_kernels.cuda import int4_experts
from slipstream_kernels.cuda.build import build, find_nvcc
from slipstream_kernels.ops import Fp8Rows, Int4Weight, Routing
from slipstream_kernels.triton.expert_weights import expert_weights
from tolerances import ELEMENTWISE, INT_MM, SCALED_MM

BACKENDS = ["reference", "triton"]
# tokens, experts, top_k
ROUTINGS = [(1, 8, 2), (7, 5, 1), (33, 6, 3), (6, 9, 8)]
# tokens, experts, top_k, out, in
SHAPES = [(1, 8, 2, 32, 64), (9, 3, 2, 80, 192), (40, 2, 1, 16, 128)]


def logits_of(num_tokens: int, num_experts: int, device, dtype=torch.float32) -> torch.Tensor:
    """Of which the last expert is never chosen."""
    logits = 2 * torch.randn(num_tokens, num_experts, device=device)
    logits[:, -1] = -40
    return logits.to(dtype)


@pytest.mark.parametrize("backend", [*BACKENDS, "triton of many tokens"])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("shape", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing(device, backend, renormalise, shape, dtype, monkeypatch) -> None:
    if backend == "triton of many tokens":
        backend = "triton"
        monkeypatch.setattr("slipstream_kernels.triton.route_experts.ROUTED_VALUES", 0)
    num_tokens, num_experts, top_k = shape
    logits = logits_of(num_tokens, num_experts, device, dtype)
    routing = ops.route_experts(logits, top_k, renormalise=renormalise, backend=backend)
    assert (routing.num_tokens, routing.num_rows, routing.num_experts) == (num_tokens, num_tokens * top_k, num_experts)
    bounds = routing.offsets.tolist()
    assert bounds[0] == 0 and bounds[-2] == bounds[-1] == num_tokens * top_k
    experts = [next(e for e in range(num_experts) if row < bounds[e + 1]) for row in range(num_tokens * top_k)]
    tokens = routing.tokens.tolist()
    assert sorted(zip(experts, tokens)) == list(zip(experts, tokens))  # within an expert in the order of tokens
    probabilities = logits.double().softmax(-1)
    for token in range(num_tokens):
        rows = routing.rows[token].tolist()
        assert [tokens[row] for row in rows] == [token] * top_k
        chosen = [experts[row] for row in rows]
        order = sorted(range(num_experts), key=lambda e: (-logits[token, e].item(), e))
        # logits that differ in the last bits may have one likelihood
        torch.testing.assert_close(logits[token, chosen], logits[token, order[:top_k]], rtol=0, atol=1e-6)
        expected = probabilities[token, chosen]
        expected = expected / expected.sum() if renormalise else expected
        torch.testing.assert_close(routing.weights[token].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_go_to_the_first_experts(device, backend) -> None:
    routing = ops.route_experts(torch.zeros(3, 4, device=device), 2, backend=backend)
    assert routing.offsets.tolist() == [0, 3, 6, 6, 6] and (routing.weights == 0.5).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_are_no_numbers_still_route(device, backend) -> None:
    """A batch of garbage, as warm-up steps may be, must not leave rows unwritten: later kernels follow them."""
    logits = torch.full((4, 5), torch.nan, device=device)
    logits[1] = torch.inf
    logits[2] = -torch.inf
    logits[3, 2:] = 1.0
    routing = ops.route_experts(logits, 2, backend=backend)
    assert routing.offsets.tolist() == [0, 3, 6, 7, 8, 8]
    assert sorted(routing.rows.flatten().tolist()) == list(range(8)) and routing.weights.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_combining(device, backend, dtype) -> None:
    routing = ops.route_experts(logits_of(5, 6, device), 3)
    y = torch.randn(15, 1030, device=device).to(dtype)
    expected = (y.double()[routing.rows.long()] * routing.weights.double()[..., None]).sum(1)
    out = ops.combine_experts(y, routing, backend=backend)
    rtol, atol = ELEMENTWISE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)


def rows_of(
    kind: str, num_rows: int, size: int, dtype: torch.dtype, device
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """(operand, what it stands for in fp64)"""
    x = torch.randn(num_rows, size, device=device).to(dtype)
    if kind != "fp8":
        return x, x.double()
    rows = ops.quantize_fp8(x)
    return rows, rows.values.double() * rows.scales.double()


def check(y, exact_x, exact_w, routing: Routing, by_token: bool, gated: bool, tolerance) -> None:
    """exact_w: [experts, out, in] in fp64."""
    rows = exact_x[routing.tokens.long()] if by_token else exact_x
    experts = torch.bucketize(torch.arange(routing.num_rows, device=rows.device), routing.offsets[1:], right=True)
    expected = torch.einsum("rk,rnk->rn", rows, exact_w[experts])
    spread = torch.einsum("rk,rnk->rn", rows.square(), exact_w[experts].square()).sqrt()
    rtol, atol = tolerance
    limit = rtol * expected.abs() + atol * spread
    if gated:
        (gate, up), (gate_limit, up_limit) = expected.chunk(2, -1), limit.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        limit = (
            1.2 * (gate_limit * up.abs() + up_limit * gate.abs()) + gate_limit * up_limit + 2 * rtol * expected.abs()
        )
    assert ((y.double() - expected).abs() <= limit).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "fp8 weight", "fp8"])
@pytest.mark.parametrize(("by_token", "gated"), [(True, True), (False, False)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_mm(device, backend, kind, by_token, gated, shape, dtype) -> None:
    if dtype == torch.float32 and kind != "plain" and torch.device(device).type == "cuda":
        pytest.skip("FP8 products on a GPU give bf16")
    num_tokens, num_experts, top_k, out_features, in_features = shape
    routing = ops.route_experts(logits_of(num_tokens, num_experts, device), top_k)
    x, exact_x = rows_of(kind, num_tokens if by_token else routing.num_rows, in_features, dtype, device)
    weight = (torch.randn(num_experts, out_features, in_features, device=device) * in_features**-0.5).to(dtype)
    scales, exact_w = None, weight.double()
    if kind != "plain":
        rows = ops.quantize_fp8(weight.flatten(0, 1))
        weight, scales = rows.values.view_as(weight), rows.scales.view(num_experts, out_features)
        exact_w = weight.double() * scales.double()[..., None]
    y = ops.grouped_mm(x, weight, routing, scales, by_token=by_token, gated=gated, backend=backend)
    assert y.dtype == dtype
    check(y, exact_x, exact_w, routing, by_token, gated, SCALED_MM[torch.device(device).type, dtype])


@needs_hopper
@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_tokens", "backend"), [(70, "library"), (600, "auto")])
def test_the_library_takes_the_same_operands(kind, gated, num_tokens, backend) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    routing = ops.route_experts(logits_of(num_tokens, 4, device), 2)
    x, exact_x = rows_of(kind, num_tokens if gated else 2 * num_tokens, 512, dtype, device)
    weight, scales = (torch.randn(4, 256, 512, device=device) * 512**-0.5).to(dtype), None
    exact_w = weight.double()
    if kind == "fp8":
        rows = ops.quantize_fp8(weight.flatten(0, 1))
        weight, scales = rows.values.view_as(weight), rows.scales.view(4, 256)
        exact_w = weight.double() * scales.double()[..., None]
    y = ops.grouped_mm(x, weight, routing, scales, by_token=gated, gated=gated, backend=backend)
    check(y, exact_x, exact_w, routing, gated, gated, SCALED_MM["cuda", dtype])


def int4_of(rows: int, in_features: int, group_size: int, has_zeros: bool, device) -> Int4Weight:
    groups = (rows, in_features // group_size)
    packed = torch.randint(256, (rows, in_features // 2), dtype=torch.uint8, device=device)
    scales = (0.5 + torch.rand(groups, device=device)) * in_features**-0.5 / 4
    zeros = torch.randint(17, groups, dtype=torch.uint8, device=device) if has_zeros else None
    return ops.int4_weight(packed, scales, zeros, group_size, in_features)


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


@needs_hopper
@pytest.mark.parametrize("gated", [False, True])
def test_fp8_rows_of_many_tokens_go_through_fp8_weights(gated) -> None:
    device = torch.device("cuda")
    routing = ops.route_experts(logits_of(700, 4, device), 2)
    x, exact_x = rows_of("fp8", 700 if gated else 1400, 512, torch.bfloat16, device)
    weight = int4_of(4 * 256, 512, 128, True, device)
    exact_w = ops.dequantize_int4(weight).double().view(4, 256, 512)
    y = ops.grouped_int4_mm(x, ops.repack_expert_int4(weight, 4), routing, by_token=gated, gated=gated)
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
    y, expected = expert_weights(repacked).float() * repacked.zeros[:, None], ops.dequantize_int4(weight)
    assert ((y - expected).abs() <= 1.01 * 2**-4 * expected.abs()).all()


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_order_of_experts_weights(blocks) -> None:
    """Any run of strips or rows of a pair of blocks lies together; a last block without a second follows."""
    weight = int4_of(48, 128 * blocks, 64, True, torch.device("cpu"))
    dense, experts = int4_layout.repack(weight), int4_layout.repack_experts(weight)
    position = 0
    for first in range(0, blocks, 2):
        for strip in range(3):
            run = dense.packed[strip, first : first + 2].flatten()
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
        assert int4_experts.tile_columns(routing) == columns
        assert int4_experts.most_tiles(routing, 8 * columns) >= -(-num_tokens // (8 * columns)) * top_k


def test_the_source_compiles(tmp_path) -> None:
    if find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    defines = int4_experts.defines(torch.bfloat16, 2, 1, True)
    assert build(int4_experts.SOURCE, defines, tmp_path).stat().st_size > 0


def test_wrong_operands_are_named(device) -> None:
    routing = ops.route_experts(logits_of(3, 4, device), 2)
    x, weight = torch.zeros(3, 64, device=device), torch.zeros(4, 6, 64, device=device)
    cases = [
        (lambda: ops.grouped_mm(x, weight, routing), r"x: shape \(3, 64\), expected \(6, 64\)"),
        (lambda: ops.grouped_mm(x, weight[:3], routing, by_token=True), "weight: shape .* of 4 experts"),
        (lambda: ops.grouped_mm(x, weight.bfloat16(), routing, by_token=True), "weight: dtype"),
        (lambda: ops.grouped_mm(x, weight[:, :5].contiguous(), routing, by_token=True, gated=True), "weight: 5 output"),
        (lambda: ops.route_experts(x, 65), "top_k: 65 of 64 experts"),
        (lambda: ops.route_experts(x.int(), 2), "logits: dtype"),
        (lambda: ops.combine_experts(x, routing), "y: shape"),
    ]
    int4 = int4_of(24, 64, 64, False, device)
    cases.append(
        (lambda: ops.grouped_int4_mm(x, int4_of(23, 64, 64, False, device), routing, by_token=True), "23 output")
    )
    cases.append(
        (lambda: ops.grouped_int4_mm(x, replace(int4, group_size=48), routing, by_token=True), "group_size: 48")
    )
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()
