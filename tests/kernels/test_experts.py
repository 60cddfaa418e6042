"""Routing and grouped products: right against fp64 expert by expert, whatever the routing; wrong operands are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import check, int4_of, logits_of, rows_of
from hopper import needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.fp8 import Fp8Rows
from slipstream_kernels.gemm import linear
from slipstream_kernels.kernel_choice import always, never
from slipstream_kernels.moe import choose, grouped_linear
from slipstream_kernels.moe.kernels import KERNELS
from slipstream_kernels.moe.triton import grouped_mm as triton_grouped_mm
from slipstream_kernels.ops import RoutingRule
from tolerances import ELEMENTWISE, SCALED_MM

BACKENDS = ["reference", "triton"]
# tokens, experts, top_k
ROUTINGS = [(1, 8, 2), (7, 5, 1), (33, 6, 3), (6, 9, 8)]
# tokens, experts, top_k, out, in
SHAPES = [(1, 8, 2, 32, 64), (9, 3, 2, 80, 192), (40, 2, 1, 16, 128)]


@pytest.mark.parametrize("backend", [*BACKENDS, "triton of many tokens"])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("shape", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing(device, backend, renormalise, shape, dtype, monkeypatch) -> None:
    if backend == "triton of many tokens":
        backend = "triton"
        monkeypatch.setattr("slipstream_kernels.moe.triton.route_experts.ROUTED_VALUES", 0)
    num_tokens, num_experts, top_k = shape
    logits = logits_of(num_tokens, num_experts, device, dtype)
    routing = ops.route_experts(logits, top_k, RoutingRule(renormalises=renormalise), backend=backend)
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


RULES = {  # rule, whether scores are biased
    "sigmoid": (RoutingRule("sigmoid"), False),
    "sigmoid, bias": (RoutingRule("sigmoid", scale=2.5), True),
    "softmax, bias": (RoutingRule(renormalises=False), True),
    "softmax, bias, renormalised": (RoutingRule(), True),
    "groups by their best": (RoutingRule(renormalises=False, scale=16.0, num_groups=4, topk_groups=2), False),
    "groups by their two best": (RoutingRule("sigmoid", True, 2.5, 4, 2, "top2sum"), True),
    "not renormalised": (RoutingRule("sigmoid", False, 1.5, 6, 3, "top2sum"), True),
}


@pytest.mark.parametrize("backend", [*BACKENDS, "triton of many tokens"])
@pytest.mark.parametrize("name", RULES)
def test_rules(device, backend, name, monkeypatch) -> None:
    """Against the rule in plain Python. Logits are multiples of a half, so that there are ties; biases reach below -1,
    so that experts of negative rank are chosen before those of groups that are left out."""
    if backend == "triton of many tokens":
        backend = "triton"
        monkeypatch.setattr("slipstream_kernels.moe.triton.route_experts.ROUTED_VALUES", 0)
    (rule, is_biased), num_tokens, num_experts, top_k = RULES[name], 21, 12, 4
    logits = (logits_of(num_tokens, num_experts, device, torch.float32) * 2).round() / 2
    bias = torch.tensor([-3, -1.25, -3.5, -1.5, -1, -2.75, -4, -2.5, -1.375, -1.25, -4, -2.5], device=device)
    used = bias if is_biased else None
    routing = ops.route_experts(logits, top_k, rule, selection_bias=used, backend=backend)
    bounds, has_negative = routing.offsets.tolist(), False
    for token in range(num_tokens):
        scores = logits[token].sigmoid() if rule.score == "sigmoid" else logits[token].softmax(-1)
        ranks = (scores + bias if is_biased else scores).tolist()
        chosen = best_by(rule, ranks, top_k)
        rows = routing.rows[token].tolist()
        assert [next(e for e in range(num_experts) if row < bounds[e + 1]) for row in rows] == chosen
        weights = scores[chosen]
        expected = (weights / weights.sum() if rule.renormalises else weights) * rule.scale
        torch.testing.assert_close(routing.weights[token], expected, rtol=1e-5, atol=1e-6)
        has_negative |= min(ranks[expert] for expert in chosen) < 0
    assert has_negative == is_biased


def best_by(rule: RoutingRule, ranks: list[float], top_k: int) -> list[int]:
    size, num_summed = len(ranks) // rule.num_groups, 2 if rule.group_score == "top2sum" else 1
    groups = [range(first, first + size) for first in range(0, len(ranks), size)]
    scores = [sum(sorted((ranks[expert] for expert in group), reverse=True)[:num_summed]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda group: -scores[group])[: rule.topk_groups]
    left = [expert for group in sorted(kept) for expert in groups[group]]
    return sorted(left, key=lambda expert: -ranks[expert])[:top_k]


@pytest.mark.parametrize("backend", [*BACKENDS, "triton of many tokens"])
@pytest.mark.parametrize("num_experts", [12, 32])
@pytest.mark.parametrize("rule", [RoutingRule(), RoutingRule("sigmoid", False, 2.5)], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_bias_of_logits_is_added_in_fp32(device, backend, num_experts, rule, dtypes, monkeypatch) -> None:
    """As if the logits had come with it; one far below all logits leaves its expert out."""
    if backend == "triton of many tokens":
        backend = "triton"
        monkeypatch.setattr("slipstream_kernels.moe.triton.route_experts.ROUTED_VALUES", 0)
    logits = logits_of(21, num_experts, device, dtypes[0])
    bias = (torch.linspace(2.0, -2.0, num_experts, device=device) ** 3).to(dtypes[1])
    bias[3] = -60.0
    selection = torch.linspace(0.0, 0.1, num_experts, device=device)
    for selection_bias in (None, selection):
        options = {"selection_bias": selection_bias, "backend": backend}
        routing = ops.route_experts(logits, 4, rule, logit_bias=bias, **options)
        expected = ops.route_experts(logits.float() + bias.float(), 4, rule, **options)
        assert torch.equal(routing.rows, expected.rows) and torch.equal(routing.offsets, expected.offsets)
        torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-6, atol=1e-7)
        sizes = routing.offsets.diff()
        assert sizes[3] == 0 and sizes[0] > 0
    plain = ops.route_experts(logits, 4, rule, backend=backend)
    assert not torch.equal(plain.offsets, routing.offsets)


def test_a_bias_of_logits_is_named_if_it_cannot_be_added() -> None:
    with pytest.raises(ValueError, match="logit_bias: shape"):
        ops.route_experts(torch.zeros(3, 4), 2, logit_bias=torch.zeros(5))
    with pytest.raises(ValueError, match="logit_bias: dtype"):
        ops.route_experts(torch.zeros(3, 4), 2, logit_bias=torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router_is_right_whoever_adds_its_bias(device, num_tokens, dtype, monkeypatch) -> None:
    """linear_before_bias and route_experts against fp64, where the library multiplies and where another kernel does."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden, router = torch.randn(num_tokens, 96, generator=generator), torch.randn(32, 96, generator=generator) / 10
    bias = torch.randn(32, generator=generator)
    x, tensor, bias = (one.to(device, dtype) for one in (hidden, router, bias))
    weight = ops.plain_weight(tensor, bias)
    exact = x.double() @ tensor.double().t() + bias.double()
    for is_by_library in (False, True):
        monkeypatch.setattr(linear, "_is_by_library", lambda *_, answer=is_by_library: answer)
        logits, left = ops.linear_before_bias(x, weight)
        assert (left is bias, logits.dtype) == ((True, torch.float32) if is_by_library else (False, dtype))
        whole = logits.float() if left is None else logits + left.float()
        rtol, atol = ELEMENTWISE[torch.float32 if is_by_library else dtype]
        torch.testing.assert_close(whole.double(), exact, rtol=rtol, atol=10 * atol)
        weights = ops.route_experts(logits, 4, logit_bias=left).weights
        expected = ops.route_experts(exact.float(), 4).weights
        torch.testing.assert_close(weights, expected, rtol=10 * rtol, atol=10 * atol)
    assert ops.linear_before_bias(x, ops.plain_weight(tensor))[1] is None


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
    shared, gate = (torch.randn(5, columns, device=device).to(dtype) for columns in (1030, 1))
    for gated, added in ((None, shared.double()), (gate, shared.double() * gate.double().sigmoid())):
        out = ops.combine_experts(y, routing, shared=shared, shared_gate=gated, backend=backend)
        torch.testing.assert_close(out.double(), expected + added, rtol=rtol, atol=2 * atol)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_biased_by_their_experts(device, backend, dtype) -> None:
    """Combined, and gated as gpt-oss gates; values beyond the limit among them."""
    routing = ops.route_experts(logits_of(5, 6, device), 3)
    y, bias = (4 * torch.randn(count, 2060, device=device).to(dtype) for count in (15, 6))
    bounds = routing.offsets.tolist()
    experts = [next(e for e in range(6) if row < bounds[e + 1]) for row in range(15)]
    rows = y.double() + bias.double()[experts]
    rtol, atol = ELEMENTWISE[dtype]
    expected = (rows[routing.rows.long()] * routing.weights.double()[..., None]).sum(1)
    out = ops.combine_experts(y, routing, bias, backend=backend)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=4 * atol)
    for given, values in ((bias, rows), (None, y.double())):
        gate, up = values[:, :1030].clamp(max=7.0), values[:, 1030:].clamp(-7.0, 7.0)
        expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        out = ops.gate_experts(y, routing, given, alpha=1.702, limit=7.0, backend=backend)
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=4 * atol)


def stored_weight(kind: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(weight [experts, out, in] as it is held, its scales, what they stand for in fp64)"""
    if kind == "plain":
        return weight, None, weight.double()
    if kind.startswith("int8"):
        held = ops.quantize_int8_weight(weight.flatten(0, 1))
        values, scales = held.values.view(weight.shape), held.scales.view(weight.shape[:2])
    elif kind == "fp8 blocks":
        scales = torch.stack([ops.block_scales(*one.shape, weight.device) for one in weight])
        values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for expert, one in enumerate(weight):
            values[expert], blocks = ops.quantize_fp8_blocks(one)
            scales[expert, :, : blocks.shape[1]] = blocks
        spread = scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        return values, scales, values.double() * spread[:, : weight.shape[1], : weight.shape[2]]
    else:
        rows = ops.quantize_fp8(weight.flatten(0, 1))
        values, scales = rows.values.view_as(weight), rows.scales.view(weight.shape[:2])
    return values, scales, values.double() * scales.double()[..., None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "fp8 weight", "fp8", "int8 weight", "int8"])
@pytest.mark.parametrize(("by_token", "gated"), [(True, True), (False, False)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_mm(device, backend, kind, by_token, gated, shape, dtype) -> None:
    if dtype == torch.float32 and kind != "plain" and torch.device(device).type == "cuda":
        pytest.skip("FP8 products on a GPU give bf16")
    num_tokens, num_experts, top_k, out_features, in_features = shape
    routing = ops.route_experts(logits_of(num_tokens, num_experts, device), top_k)
    x, exact_x = rows_of(kind, num_tokens if by_token else routing.num_rows, in_features, dtype, device)
    drawn = (torch.randn(num_experts, out_features, in_features, device=device) * in_features**-0.5).to(dtype)
    weight, scales, exact_w = stored_weight(kind, drawn)
    y = ops.grouped_mm(x, weight, routing, scales, by_token=by_token, gated=gated, backend=backend)
    assert y.dtype == dtype
    check(y, exact_x, exact_w, routing, by_token, gated, SCALED_MM[torch.device(device).type, dtype])


def test_the_order_of_tiles_changes_nothing(device, monkeypatch) -> None:
    """Groups of two tiles of rows, of which the last is alone, by three blocks of output features."""
    routing = ops.route_experts(logits_of(70, 3, device), 2)
    x, weight = torch.randn(70, 64, device=device).bfloat16(), torch.randn(3, 160, 64, device=device).bfloat16()
    plain = ops.grouped_mm(x, weight, routing, by_token=True, backend="triton")
    for key, tile in triton_grouped_mm.TILES.items():
        monkeypatch.setitem(triton_grouped_mm.TILES, key, replace(tile, group_tiles=2))
    assert torch.equal(ops.grouped_mm(x, weight, routing, by_token=True, backend="triton"), plain)


# tokens, experts, top_k, out, in: an expert's last block of output features may end early, if it is alone
BLOCK_SHAPES = [(1, 4, 2, 256, 128), (9, 3, 2, 128, 640), (5, 1, 1, 80, 256), (300, 3, 2, 512, 1024)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_scales_of_blocks(device, backend, by_token, shape) -> None:
    num_tokens, num_experts, top_k, out_features, in_features = shape
    if num_tokens > 9 and torch.device(device).type == "cpu":
        pytest.skip("many tokens take CPUs long")
    routing = ops.route_experts(logits_of(num_tokens, num_experts, device), top_k)
    gated = by_token and out_features % 256 == 0
    x, exact_x = rows_of(
        "fp8 blocks", num_tokens if by_token else routing.num_rows, in_features, torch.bfloat16, device
    )
    drawn = torch.randn(num_experts, out_features, in_features, device=device) * in_features**-0.5
    drawn *= 1 + torch.arange(drawn.numel(), device=device).view_as(drawn) // 128 % 7  # blocks of unlike scales
    weight, scales, exact_w = stored_weight("fp8 blocks", drawn.bfloat16())
    y = ops.grouped_mm(x, weight, routing, scales, by_token=by_token, gated=gated, backend=backend)
    check(y, exact_x, exact_w, routing, by_token, gated, SCALED_MM[torch.device(device).type, torch.bfloat16])


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


@pytest.mark.parametrize("gates", [False, True])
def test_what_gates_writes_rows_as_the_next_product_reads_them(device, gates, monkeypatch) -> None:
    """The same numbers as silu_mul, then quantize_fp8; a kernel that gates leaves rows plain."""
    torch.manual_seed(0)
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, replace(kernel, gates=always if gates else never))
    monkeypatch.setattr(grouped_linear, "variant_of", choose.variant_of.__wrapped__)
    routing = ops.route_experts(logits_of(9, 3, device), 2)
    drawn = (torch.randn(3 * out, 64, device=device).bfloat16() / 8 for out in (128, 48))
    stored = (ops.quantize_fp8(weight) for weight in drawn)
    gate_up, down = (ops.fp8_weight(rows.values, rows.scales.flatten(), num_experts=3) for rows in stored)
    x = torch.randn(9, 64, device=device).bfloat16()
    inner = ops.grouped_gated_linear(x, gate_up, routing, down.input_quant, by_token=True)
    plain = ops.grouped_linear(x, gate_up, routing, by_token=True, gated=True)
    assert isinstance(inner, torch.Tensor if gates else Fp8Rows)
    if not gates:
        apart = ops.quantize_fp8(plain)
        assert torch.equal(inner.values.float(), apart.values.float()) and torch.equal(inner.scales, apart.scales)
    assert torch.equal(ops.grouped_linear(inner, down, routing), ops.grouped_linear(plain, down, routing))


def test_wrong_operands_are_named(device) -> None:
    routing = ops.route_experts(logits_of(3, 4, device), 2)
    x, y, weight = (torch.zeros(*size, device=device) for size in ((3, 64), (6, 64), (4, 6, 64)))
    cases = [
        (lambda: ops.grouped_mm(x, weight, routing), r"x: shape \(3, 64\), expected \(6, 64\)"),
        (lambda: ops.grouped_mm(x, weight[:3], routing, by_token=True), "weight: shape .* of 4 experts"),
        (lambda: ops.grouped_mm(x, weight.bfloat16(), routing, by_token=True), "weight: dtype"),
        (lambda: ops.grouped_mm(x, weight[:, :5].contiguous(), routing, by_token=True, gated=True), "weight: 5 output"),
        (lambda: ops.route_experts(x, 65), "top_k: 65 of 64 experts"),
        (lambda: ops.route_experts(x, 2, RoutingRule(num_groups=3)), "rule: 64 experts are not 3 groups"),
        (lambda: ops.route_experts(x, 2, selection_bias=torch.zeros(63)), "selection_bias: shape"),
        (lambda: ops.route_experts(x.int(), 2), "logits: dtype"),
        (lambda: ops.combine_experts(x, routing), "y: shape"),
        (lambda: ops.combine_experts(y, routing, shared=x[:2]), "shared: shape"),
        (lambda: ops.combine_experts(y, routing, shared=x.half()), "shared: must be contiguous and torch.float32"),
        (lambda: ops.combine_experts(y, routing, shared=x, shared_gate=x), "shared_gate: shape"),
        (lambda: ops.combine_experts(y, routing, shared_gate=x[:, :1]), "shared_gate: given without shared"),
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
