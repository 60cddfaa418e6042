"""Long sums of 129 to 256 rows by cuBLAS's older interface: right, in a graph too; the preference stays as it was."""

from __future__ import annotations

import pytest
import torch
from hopper import needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.gemm.choose import variant_of
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product
from slipstream_kernels.kernel_choice import Variant


def test_runs_and_restores_the_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["cublaslt"]

    def preferred(name: str | None = None) -> str:
        told.extend([name] if name else [])
        return told[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    x, weight = torch.randn(3, 16), ops.plain_weight(torch.randn(8, 16), torch.randn(8))
    run = KERNELS["library_split"].run
    assert torch.equal(run(x, weight, (), False), ops.linear(x, weight))
    assert told == ["cublaslt", "cublas", "cublaslt"]
    with pytest.raises(RuntimeError, match="shapes"):
        run(torch.randn(3, 15), weight, (), False)
    assert told[-1] == "cublaslt"


def test_is_refused_where_it_was_not_measured() -> None:
    kind = ops.plain_weight(torch.zeros(16, 64)).kind
    assert KERNELS["library_split"].refusal(Product(kind, 200, PLAIN_ROWS, torch.bfloat16)) is not None
    assert variant_of(Product(kind, 200, PLAIN_ROWS, torch.bfloat16)).kernel == "library"


@needs_hopper
@pytest.mark.parametrize("num_rows", [129, 200, 256])
def test_long_sums_are_right(num_rows: int) -> None:
    torch.backends.cuda.preferred_blas_library("cublaslt")
    x = torch.randn(num_rows, 14336, device="cuda", dtype=torch.bfloat16)
    weight = ops.plain_weight(torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16) / 120)
    product = Product(weight.kind, num_rows, PLAIN_ROWS, torch.bfloat16)
    assert variant_of(product) == Variant("library_split", (), False)
    exact = x.double() @ weight.tensor.double().T
    graph = torch.cuda.CUDAGraph()
    outputs = [ops.linear(x, weight)]
    with torch.cuda.graph(graph):
        outputs.append(ops.linear(x, weight))
    graph.replay()
    for y in outputs:
        assert (y.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt
