"""Grouped products of few rows an expert in CUDA: right against fp64 for every tile and routing, the same every run."""

from __future__ import annotations

import pytest
import torch
from expert_cases import check, logits_of
from hopper import assert_compiles_well, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.gemm.linear_weight import LinearWeight, plain_weight
from slipstream_kernels.gemm.product import FP8_ROWS, WeightKind
from slipstream_kernels.kernel_choice import Variant as Choice
from slipstream_kernels.moe.choose import variant_of
from slipstream_kernels.moe.cuda import grouped_stream
from slipstream_kernels.moe.cuda.grouped_stream import COLUMNS, Variant
from slipstream_kernels.moe.product import Product
from slipstream_kernels.ops import Fp8Rows, Routing
from tolerances import SCALED_MM

KINDS = ("plain", "fp8", "fp8 blocks")
VARIANTS = [Variant(columns, guesses_all) for columns in COLUMNS for guesses_all in (False, True)]
# tokens, experts, top_k, out, in: tiles with a rest of output features, experts of several tiles, CTAs without a tile
SHAPES = [
    (1, 8, 2, 512, 256),
    (7, 5, 1, 144, 512),
    (64, 16, 6, 272, 1408),
    (300, 4, 2, 1280, 256),
    (130, 70, 6, 768, 768),
    (1000, 3, 2, 256, 128),
]


class Case:
    """Operands of one product, and what they stand for in fp64."""

    def __init__(self, kind: str, shape: tuple[int, int, int, int, int], gated: bool, logits: torch.Tensor) -> None:
        num_tokens, num_experts, top_k, out_features, in_features = shape
        self.gated, self.routing = gated, ops.route_experts(logits, top_k)
        num_rows = num_tokens if gated else self.routing.num_rows
        x = torch.randn(num_rows, in_features, device="cuda").bfloat16()
        weight = torch.randn(num_experts, out_features, in_features, device="cuda") * in_features**-0.5
        self.x, self.weight, self.exact = operands(kind, x, weight.bfloat16())

    def multiply(self, variant: Variant) -> torch.Tensor:
        return grouped_stream.grouped_mm(self.x, self.weight, self.routing, self.gated, self.gated, variant)

    def check(self, y: torch.Tensor) -> None:
        check(y, *self.exact, self.routing, self.gated, self.gated, SCALED_MM["cuda", torch.bfloat16])


def operands(
    kind: str, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | Fp8Rows, LinearWeight, tuple[torch.Tensor, torch.Tensor]]:
    """(rows, weights, what both stand for)"""
    if kind == "plain":
        held = plain_weight(weight, counters=ops.expert_counters(weight.device))
        return x, held, (x.double(), weight.double())
    if kind == "fp8 blocks":
        return by_blocks(x, weight)
    rows, stored = ops.quantize_fp8(x), ops.quantize_fp8(weight.flatten(0, 1))
    counters = ops.scaled_mm_counters(stored.values)
    held = ops.fp8_weight(stored.values, stored.scales.flatten(), None, counters, num_experts=len(weight))
    exact = stored.values.double() * stored.scales.double()
    return rows, held, (rows.values[: len(x)].double() * rows.scales[: len(x)].double(), exact.view_as(weight))


def by_blocks(x: torch.Tensor, weight: torch.Tensor) -> tuple[Fp8Rows, LinearWeight, tuple[torch.Tensor, torch.Tensor]]:
    """The same with scales of 128 columns of a row and of 128 x 128 weights."""
    rows = ops.quantize_fp8(x, ops.Fp8Scheme(128))
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.stack([ops.block_scales(*one.shape, weight.device) for one in weight])
    for expert, one in enumerate(weight):
        values[expert], found = ops.quantize_fp8_blocks(one)
        scales[expert, :, : found.shape[1]] = found
    num_experts, out_features, in_features = weight.shape
    kind = WeightKind("fp8_block", out_features, in_features, values.dtype, values.device, 128, FP8_ROWS, num_experts)
    held = LinearWeight(kind, values, scales, counters=ops.expert_counters(weight.device))
    spread = scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :out_features, :in_features]
    of_rows = rows.scales[: len(x)].double().repeat_interleave(128, 1)
    return rows, held, (rows.values[: len(x)].double() * of_rows, values.double() * spread)


@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_right_and_the_same_every_run(kind: str, gated: bool, shape: tuple[int, int, int, int, int]) -> None:
    if kind == "fp8 blocks" and gated and shape[3] % 256:
        pytest.skip("gate and up are whole blocks")
    torch.manual_seed(0)
    case = Case(kind, shape, gated, logits_of(*shape[:2], "cuda"))
    for variant in VARIANTS:
        y = case.multiply(variant)
        case.check(y)
        assert all(torch.equal(case.multiply(variant), y) for _ in range(5)), f"{variant}: other bits"
        assert case.weight.counters is not None and not case.weight.counters.any(), f"{variant}: counters are left"


@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [(7, 8), (0, 1), (0, 7)])
def test_wrong_guesses_are_discarded(kind: str, chosen: tuple[int, int]) -> None:
    """All tokens choose two experts: those of the last tiles, of the first ones, with a gap between."""
    torch.manual_seed(0)
    logits = torch.full((40, 9), -40.0, device="cuda")
    logits[:, list(chosen)] = torch.randn(40, 2, device="cuda")
    case = Case(kind, (40, 9, 2, 4096, 1024), True, logits)
    y = case.multiply(Variant(32, True))
    case.check(y)
    assert torch.equal(case.multiply(Variant(32, False)), y)


@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_that_change_at_the_last_moment(kind: str) -> None:
    """In a graph, right behind the kernel that writes them: what is read early is of the replay before."""
    torch.manual_seed(0)
    shape = 48, 12, 2, 1024, 1024
    first, second = (torch.randn(48, 12, device="cuda") - 30 * (torch.rand(12, device="cuda") < 0.5) for _ in range(2))
    case, logits = Case(kind, shape, False, first), first.clone()
    case.multiply(Variant(32, True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.routing = ops.route_experts(logits, 2)
        y = case.multiply(Variant(32, True))
    for drawn in (first, second, first, first, second):
        logits.copy_(drawn)
        y.zero_()
        graph.replay()
        case.check(y)


@needs_hopper
@pytest.mark.parametrize("producer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_late_producer_changes_nothing(kind: str, producer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    case = Case(kind, (64, 16, 6, 512, 1408), True, logits_of(64, 16, "cuda"))
    expected, defines = case.multiply(Variant(32, True)), grouped_stream.defines
    late = f"SLIPSTREAM_LATE_PRODUCER={producer}"
    monkeypatch.setattr(grouped_stream, "defines", lambda *names: (*defines(*names), late))
    assert torch.equal(case.multiply(Variant(32, True)), expected)


@needs_hopper
def test_long_fp8_sums_of_one_sign_stay_exact() -> None:
    """Sums in the tensor cores alone lose small terms: 14336 of one sign would be off by several percent."""
    routing = ops.route_experts(logits_of(20, 4, "cuda"), 2)
    x = torch.rand(routing.num_rows, 14336, device="cuda").bfloat16()
    rows, held, (exact_x, exact_w) = operands("fp8", x, torch.rand(4, 256, 14336, device="cuda").bfloat16())
    y = grouped_stream.grouped_mm(rows, held, routing, False, False, Variant(32, True))
    experts = torch.bucketize(torch.arange(routing.num_rows, device="cuda"), routing.offsets[1:], right=True)
    expected = torch.stack([exact_w[expert] @ row for expert, row in zip(experts.tolist(), exact_x)])
    assert ((y.double() - expected).abs() <= expected / 200).all()


@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_a_graph_sees_what_the_kernels_before_wrote(kind: str) -> None:
    """Norm, choice of experts, both products: each begins while the one before it runs."""
    torch.manual_seed(0)
    hidden, inner, experts = 512, 256, 16
    drawn = [(torch.randn(experts, *size, device="cuda") / size[1] ** 0.5).bfloat16() for size in
             ((2 * inner, hidden), (hidden, inner))]  # fmt: skip
    spare = torch.zeros(64, hidden, device="cuda").bfloat16()
    gate_up, down = (operands(kind, spare[:, : one.shape[2]].contiguous(), one)[1] for one in drawn)
    x, router = (
        torch.randn(64, hidden, device="cuda").bfloat16(),
        torch.randn(experts, hidden, device="cuda").bfloat16(),
    )
    norm = torch.ones(hidden, device="cuda").bfloat16()

    def quantised(rows: torch.Tensor) -> torch.Tensor | Fp8Rows:
        scheme = ops.Fp8Scheme(128 if kind == "fp8 blocks" else 0)
        return rows if kind == "plain" else ops.quantize_fp8(rows, scheme)

    def layers(count: int, of_stream: bool) -> torch.Tensor:
        rows = x
        for _ in range(count):
            normed = ops.rms_norm(rows, norm, 1e-5)
            assert isinstance(normed, torch.Tensor)
            routing = ops.route_experts(normed @ router.t(), 4)
            rows = ops.combine_experts(product(down, product(gate_up, normed, routing, True, of_stream), routing, False,
                                               of_stream), routing)  # fmt: skip
        return rows

    def product(
        weight: LinearWeight, rows: torch.Tensor, routing: Routing, gated: bool, of_stream: bool
    ) -> torch.Tensor:
        given = quantised(rows)
        if of_stream:
            return grouped_stream.grouped_mm(given, weight, routing, gated, gated, Variant(32, True))
        return ops.grouped_mm(
            given, weight.tensor, routing, weight.scales, by_token=gated, gated=gated, backend="triton"
        )

    torch.testing.assert_close(layers(1, True).float(), layers(1, False).float(), rtol=0.05, atol=0.05)
    plain = layers(4, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(4, True)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, plain)


@needs_hopper
def test_it_is_chosen_for_few_rows() -> None:
    kind = plain_weight(torch.empty(64, 2816, 2048, device="cuda", dtype=torch.bfloat16)).kind
    chosen = variant_of(Product(kind, 64, 384, torch.bfloat16, True))
    assert chosen == Choice("grouped_stream", Variant(32, True), True)


@pytest.mark.parametrize(
    ("form", "num_tokens", "top_k", "num_experts", "expected"),
    [
        ("plain", 1, 6, 64, Variant(32, False)),
        ("plain", 64, 6, 64, Variant(32, True)),
        ("plain", 256, 6, 64, Variant(64, True)),
        ("plain", 30, 8, 8, Variant(32, True)),  # no expert has more rows than there are tokens
        ("plain", 512, 6, 64, Variant(64, True)),
        ("fp8_block", 64, 8, 128, Variant(32, True)),
        ("fp8_block", 256, 8, 128, Variant(64, True)),
    ],
)
def test_tiles_hold_the_rows_of_most_experts(
    form: str, num_tokens: int, top_k: int, num_experts: int, expected: Variant
) -> None:
    kind = WeightKind(form, 512, 512, torch.bfloat16, torch.device("cpu"), num_experts=num_experts)
    assert grouped_stream.choose(Product(kind, num_tokens, num_tokens * top_k, torch.bfloat16)) == expected


def test_what_it_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = WeightKind("plain", 256, 256, torch.bfloat16, torch.device("cpu"), num_experts=8)
    product = Product(kind, 4, 8, torch.bfloat16)
    refusal = grouped_stream.product_refusal.__wrapped__
    assert "on cpu" in (refusal(product) or "")
    monkeypatch.setattr(grouped_stream, "hopper_refusal", lambda device, what: None)
    monkeypatch.setattr(grouped_stream, "missing", lambda source, defines: None)
    assert refusal(product) is None
    for changed, named in (
        (product._replace(dtype=torch.float16), "float16"),
        (product._replace(weight=kind._replace(num_experts=513)), "513 experts"),
        (product._replace(weight=kind._replace(in_features=224)), "in_features 224"),
        (product._replace(weight=kind._replace(out_features=264), gated=True), "out_features 264"),
    ):
        assert named in (refusal(changed) or "")


@pytest.mark.parametrize("defines", grouped_stream.variants(), ids=str)
def test_compiles_without_spills(defines: tuple[str, ...]) -> None:
    assert_compiles_well(grouped_stream.SOURCE, defines)
