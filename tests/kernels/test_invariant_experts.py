"""Deterministic mode's experts: what a token gets of them is the same to the bit whatever the other tokens are."""

from __future__ import annotations

import pytest
import torch
from expert_cases import check, logits_of
from slipstream_kernels import ops
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.moe.choose import variant_of
from slipstream_kernels.moe.product import Product
from slipstream_kernels.moe.triton import invariant_grouped_mm, route_experts
from slipstream_kernels.ops import Routing, RoutingRule
from tolerances import SCALED_MM

pytestmark = pytest.mark.usefixtures("products_of_equal_rows")
WEIGHTS = ("plain", "e4m3", "int8")
SOFTMAX = RoutingRule(renormalises=False)  # whose weights are shares of all experts' scores


def draw_weight(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.randn(shape) * shape[2] ** -0.5
    if kind == "plain":
        return weight.to(dtype), None
    scales = 0.5 + torch.rand(shape[:2])
    if kind == "e4m3":
        return weight.to(E4M3), scales
    return (weight * 400).clamp(-127, 127).round().to(torch.int8), scales / 400


def route(logits: torch.Tensor, top_k: int = 2) -> Routing:
    return ops.route_experts(logits, top_k, SOFTMAX, is_invariant=True, backend="triton")


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_product_is_right(device: torch.device, dtype: torch.dtype, by_token: bool, kind: str) -> None:
    """The last expert has no rows; neither features nor rows fill their tiles."""
    torch.manual_seed(1)
    routing = route(logits_of(19, 4, device))
    weight, scales = (None if one is None else one.to(device) for one in draw_weight(kind, (4, 72, 160), dtype))
    x = torch.randn(19 if by_token else 38, 160, device=device).to(dtype)
    exact = weight.double() if scales is None else weight.double() * scales.double()[..., None]
    for backend in ("reference", "triton"):
        y = ops.invariant_grouped_mm(x, weight, routing, scales, by_token=by_token, backend=backend)
        assert y.dtype == dtype
        check(y, x.double(), exact, routing, by_token, False, SCALED_MM[device.type, dtype])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_token_is_the_same_alone_and_in_any_company(device: torch.device, kind: str) -> None:
    """Routed, multiplied, multiplied again and summed: in tiles of 16 and 64 rows, and as ops.invariant_mm does.

    More than 1,024 input features: sums have two parts.
    """
    torch.manual_seed(2)
    num_experts, size, dtype = 3, 1056, torch.bfloat16
    up, down = draw_weight(kind, (num_experts, 24, size), dtype), draw_weight(kind, (num_experts, 40, 24), dtype)
    (up, up_scales), (down, down_scales) = (
        tuple(None if one is None else one.to(device) for one in pair) for pair in (up, down)
    )
    logits, x = logits_of(60, num_experts, device), torch.randn(60, size, device=device).to(dtype)

    def experts(tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routing = route(logits[tokens])
        inner = ops.invariant_grouped_mm(x[tokens], up, routing, up_scales, by_token=True, backend="triton")
        rows = ops.invariant_grouped_mm(inner, down, routing, down_scales, backend="triton")
        own = routing.rows.long()
        return routing.weights, inner[own], ops.combine_experts(rows, routing, backend="triton")

    assert [invariant_grouped_mm._rows_of_a_tile(route(logits[:count])) > 16 for count in (60, 5)] == [True, False]
    whole = experts(slice(0, 60))
    for first, last in ((0, 1), (7, 8), (3, 8), (20, 59)):
        for part, all_rows in zip(experts(slice(first, last)), whole):
            assert torch.equal(part, all_rows[first:last]), f"tokens {first} to {last}"
    expert = int(logits[7].argmax())
    scales = None if up_scales is None else up_scales[expert]
    dense = ops.invariant_mm(x[7:8], up[expert], scales, backend="triton")
    assert torch.equal(dense[0], whole[1][7, 0])


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_a_token_is_routed_in_one_tile_whatever_their_number(
    device: torch.device, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads share the sum of a token's scores by the shape of the tile, so that other shapes round otherwise."""
    kernel, tiles = route_experts._choose_experts_kernel, []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]):
            def launch(*arguments: object, **constants: object) -> None:
                tiles.append((constants["BLOCK_M"], constants.get("num_warps")))
                kernel[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(route_experts, "_choose_experts_kernel", Recorder())
    routing = route(logits_of(num_tokens, 60, device), 4)
    assert tiles == [(route_experts.UNALIGNED_VALUES // 64, None)]
    assert sorted(routing.rows.flatten().tolist()) == list(range(4 * num_tokens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large products take the interpreter minutes")
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_so_it_is_with_published_sizes(kind: str, dtype: torch.dtype) -> None:
    """Of Qwen3-30B-A3B: 128 experts, 8 of a token, in all three tiles."""
    torch.manual_seed(3)
    device = torch.device("cuda")
    weight, scales = (
        None if one is None else one.to(device) for one in draw_weight(kind, (128, 1536, 2048), torch.float32)
    )
    weight = weight.to(dtype) if kind == "plain" else weight
    logits, x = logits_of(4096, 128, device), torch.randn(4096, 2048, device=device).to(dtype)

    def product(tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        routing = route(logits[tokens], 8)
        y = ops.invariant_grouped_mm(x[tokens], weight, routing, scales, by_token=True)
        return routing.weights, y[routing.rows.long()]

    whole = product(slice(0, 4096))
    for first, last in ((0, 1), (5, 12), (100, 164), (100, 700), (1000, 3000)):
        for part, all_rows in zip(product(slice(first, last)), whole):
            assert torch.equal(part, all_rows[first:last]), f"tokens {first} to {last}"


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_deterministic_weight_of_experts_is_multiplied_by_it(kind: str) -> None:
    """Whatever the number of rows, gated or not; features and experts are told apart."""
    weight, scales = draw_weight(kind, (3, 32, 48), torch.float32)
    flat = None if scales is None else scales.flatten()
    held = ops.deterministic_weight(weight.flatten(0, 1), flat, num_experts=3)
    assert held.tensor.shape == (3, 32, 48) and (held.kind.out_features, held.kind.num_experts) == (32, 3)
    assert scales is None or torch.equal(held.scales, scales)
    for rows in (1, 4096):
        for gated in (False, True):
            variant = variant_of(Product(held.kind, rows, 2 * rows, torch.bfloat16, gated))
            assert (variant.kernel, variant.is_gated) == ("invariant_grouped_mm", False)


def test_what_does_not_fit_is_named() -> None:
    routing = ops.route_experts(logits_of(3, 4, torch.device("cpu")), 2)
    x, weight, scales = torch.zeros(3, 64), torch.zeros(4, 6, 64), torch.ones(4, 6)
    for named, arguments in {
        "x: shape": (x[:2], weight, routing),
        "weight: shape": (x, weight[:3], routing),
        "weight: dtype": (x, weight.bfloat16(), routing),
        "scales: .* has none": (x, weight, routing, scales),
        "scales: .* needs some": (x, weight.to(torch.int8), routing),
        "scales: shape": (x, weight.to(torch.int8), routing, scales[:3]),
        "scales: must be": (x, weight.to(torch.int8), routing, scales.half()),
    }.items():
        with pytest.raises(ValueError, match=named):
            ops.invariant_grouped_mm(*arguments, by_token=True)
