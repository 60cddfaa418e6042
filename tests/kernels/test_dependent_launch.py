"""Kernels that come up before the kernel before them has ended: they compute the same, and do come up so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from decode_cases import make_case
from slipstream_kernels import ops
from slipstream_kernels.dependent_launch import launches_dependently

CUDA = torch.device("cuda")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not launches_dependently(CUDA), reason="needs a GPU of compute capability 9.0"
)
SIZE = 1024
SIZES = (32, 16, 8, 4, 2, 1)  # tokens: each round's are half of those before, taken two by two


def test_a_cpu_launches_nothing_early() -> None:
    assert not launches_dependently(torch.device("cpu"))


def _chain(seed: int) -> Callable[[Callable[[], None]], list[torch.Tensor]]:
    """Kernels of which each reads what the one before has just written, and nothing of torch's between them.

    The function that is returned calls its argument after each of them.
    """
    torch.manual_seed(seed)
    weight = torch.rand(SIZE, device=CUDA).bfloat16()
    first = torch.randn(64, SIZE, device=CUDA).bfloat16()
    cases = {n: make_case([1] * n, [1 + 29 * i for i in range(n)], (8, 2, 128, 64), seed=n).to(CUDA) for n in SIZES}
    torch.cuda.synchronize()

    def run(after_each: Callable[[], None]) -> list[torch.Tensor]:
        hidden, kept = first, []
        for num_tokens in SIZES:
            normed = ops.rms_norm(hidden, weight, 1e-5)
            after_each()
            gated = ops.silu_mul(normed.view(num_tokens, 2 * SIZE))
            after_each()
            case = replace(cases[num_tokens], q=gated.view(num_tokens, 8, 128))
            attended = ops.decode_attention(*case.arguments(is_prefix_settled=True), backend="cuda")
            after_each()
            rows, hidden = ops.rms_norm_fp8(attended.view(num_tokens, SIZE), weight, 1e-5, gated, ops.Fp8Scheme())
            after_each()
            scaled = ops.scale_logits(hidden, 0.5, 30.0)
            after_each()
            kept += [gated, attended, rows.values.view(torch.uint8), rows.scales, hidden, scaled, ops.greedy(scaled)]
            after_each()
        return kept

    return run


@needs_hopper
@pytest.mark.parametrize("seed", range(3))
def test_overlapping_kernels_are_those_one_after_the_other(seed: int) -> None:
    run = _chain(seed)
    expected = run(torch.cuda.synchronize)
    for _ in range(20):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(run(lambda: None), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run(lambda: None)
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, expected))


@needs_hopper
def test_a_graph_keeps_the_early_launches() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    x, weight = torch.randn(4, SIZE, device=CUDA).bfloat16(), torch.ones(SIZE, device=CUDA).bfloat16()
    ops.rms_norm(x, weight, 1e-5)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(6):
            x = ops.rms_norm(x, weight, 1e-5)
    handle = runtime.cudaGraph_t(int(graph.raw_cuda_graph()))
    count = runtime.cudaGraphGetEdges(handle)[-1]
    edges = runtime.cudaGraphGetEdges(handle, count)[3]
    programmatic = int(runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic)
    assert Counter(int(edge.type) for edge in edges) == {programmatic: 5}
