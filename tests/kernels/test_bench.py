"""The benchmark runs and relates what it measures to the machine's limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from slipstream_kernels import bench, bench_router, ops

SMALL = replace(bench.CPU_SHAPES, num_tokens=9, vocab_size=600, num_requests=3, context_len=70, prompt_len=40)


def test_every_case_runs(device: torch.device) -> None:
    results = []
    for cases in (
        bench.elementwise_cases(SMALL, torch.float32, device, "auto"),
        bench.attention_cases(SMALL, torch.float32, device, "auto"),
        bench.sampling_cases(SMALL, device, "auto"),
    ):
        results += bench.run_cases(cases, device, (2e9, 2e12), repeats=1)
    assert {"rms_norm + residual", "decode attention", "prefill attention", "sample fp32 top-p 0.9"} <= {
        r.name for r in results
    }
    for result in results:
        # In units of GB/s and TFLOP/s both limits are 2.
        assert result.time_us > 0 and result.share == pytest.approx(result.rate / 2)


def test_limits_are_measured(device: torch.device) -> None:
    copy_rate, matmul_rate = bench.measure_limits(device, torch.float32, repeats=1)
    assert copy_rate > 1e7 and matmul_rate > 1e7


def test_routers_that_are_timed_choose_alike(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    x, router, bias = (torch.randn(*size, generator=generator).to(device) for size in ((20, 64), (32, 64), (32,)))
    weight = ops.plain_weight(router, bias)
    routings = [bench_router.route(product, x, weight, 4) for product in bench_router.PRODUCTS.values()]
    for routing in routings[1:]:
        assert torch.equal(routing.rows, routings[0].rows)
        torch.testing.assert_close(routing.weights, routings[0].weights, rtol=1e-4, atol=1e-5)
