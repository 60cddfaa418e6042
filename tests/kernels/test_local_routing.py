"""A rank's part of a routing: over all ranks, the sum is that of the whole routing."""

from __future__ import annotations

import torch
from slipstream_kernels import ops


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
