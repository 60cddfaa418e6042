"""A rank's part of a routing: over all ranks, the sum is that of the whole routing."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.gemm.linear_weight import plain_weight
from slipstream_kernels.moe import grouped_linear
from slipstream_kernels.moe.choose import variant_of
from slipstream_kernels.moe.product import Product
from slipstream_kernels.moe.triton.grouped_mm import tile_of


def test_the_sum_over_ranks_is_the_whole() -> None:
    """With experts that no token takes, and with undefined rows of products, which are NaN here."""
    generator = torch.Generator().manual_seed(3)
    logits, x = torch.randn(9, 8, generator=generator), torch.randn(9, 16, generator=generator)
    logits[:, 2] = -50.0
    weight = torch.randn(8, 5, 16, generator=generator)
    whole = ops.route_experts(logits, 3)
    expected = ops.combine_experts(ops.grouped_mm(x, weight, whole, by_token=True), whole)
    found = torch.zeros_like(expected)
    for own in (slice(0, 2), slice(2, 3), slice(3, 8)):
        routing = ops.local_routing(whole, own)
        assert routing.num_experts == own.stop - own.start and int(routing.offsets[0]) == 0
        y = ops.grouped_mm(x, weight[own], routing, by_token=True)
        y[int(routing.offsets[-1]) :] = torch.nan
        found += ops.combine_experts(ops.local_rows(y, routing), routing)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_biases_of_a_rank_s_experts(device, backend: str) -> None:
    """Rows of other ranks' experts, which are NaN here, have the weight 0 and no expert's bias of this rank."""
    torch.manual_seed(4)
    whole, size = ops.route_experts(torch.randn(7, 6, device=device), 2), 8
    weight = torch.randn(6, 2 * size, 12, device=device)
    x, inner, outer = (torch.randn(*sizes, device=device) for sizes in ((7, 12), (6, 2 * size), (6, size)))

    def layer(routing: ops.Routing, own: slice) -> torch.Tensor:
        y = ops.grouped_mm(x, weight[own], routing, by_token=True)
        y[int(routing.offsets[-1]) :] = torch.nan
        gated = ops.gate_experts(y, routing, inner[own].contiguous(), alpha=1.7, limit=7.0, backend=backend)
        return ops.combine_experts(ops.local_rows(gated, routing), routing, outer[own].contiguous(), backend=backend)

    expected = layer(whole, slice(0, 6))
    found = sum(layer(ops.local_routing(whole, own), own) for own in (slice(0, 1), slice(1, 4), slice(4, 6)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_kernels_are_chosen_by_the_rows_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the experts has a quarter of the rows on average, and memory for all of them."""
    whole = ops.route_experts(torch.randn(64, 16), 2)
    routing = ops.local_routing(whole, slice(4, 8))
    products: list[Product] = []
    monkeypatch.setattr(grouped_linear, "variant_of", lambda product: products.append(product) or variant_of(product))
    y = grouped_linear.grouped_linear(torch.randn(64, 12), plain_weight(torch.randn(4, 8, 12)), routing, by_token=True)
    assert y.shape == (128, 8) and [(one.num_tokens, one.num_rows) for one in products] == [(64, 32)]
    assert whole.sizes == (64, 128, 16)
    assert routing.sizes == (64, 32, 4) and routing.num_rows == 128
    assert ops.local_routing(ops.route_experts(torch.randn(1, 16), 2), slice(0, 4)).sizes == (1, 1, 4)


def test_tiles_hold_the_rows_of_a_rank() -> None:
    """A rank's average expert has as many rows as that of all ranks."""
    whole, x = ops.route_experts(torch.randn(64, 16), 4), torch.empty(64, 8, dtype=torch.bfloat16)
    routing = ops.local_routing(whole, slice(4, 8))
    assert tile_of(routing, x, False) == tile_of(whole, x, False)
