"""Products by the library whose results' rows would not be aligned: they lie further apart than they are long."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from slipstream_kernels import ops
from slipstream_kernels.gemm.library import linear as library

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_rows_are_aligned(dtype: torch.dtype, has_bias: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, 64, generator=generator).to(device, dtype) for rows in (17, 321))
    bias = weight[:, 0].clone() if has_bias else None
    y = library.aligned_linear(x, weight, bias)
    assert y.shape == (17, 321) and y.stride(0) * y.element_size() % 16 == 0 and y.stride(1) == 1
    assert torch.allclose(y.float(), F.linear(x, weight, bias).float(), atol=1e-4 if dtype == torch.float32 else 0.2)


@GPU
@pytest.mark.parametrize("vocab_size", [49155, 32002, 32000])
def test_logits_of_any_vocabulary(vocab_size: int) -> None:
    """And what reads them: draws, and the copy in fp32."""
    torch.manual_seed(5)
    weight = torch.randn(vocab_size, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(33, 256, device="cuda", dtype=torch.bfloat16)
    logits = ops.linear(x, ops.linear_weight(weight))
    expected = x.float() @ weight.float().t()
    assert logits.shape == (33, vocab_size) and (logits.float() - expected).abs().max() < 0.01 * expected.abs().max()
    assert torch.equal(ops.greedy(logits), logits.argmax(dim=1))
    assert torch.equal(ops.greedy(logits.float()), logits.argmax(dim=1))
    drawn = ops.sample(logits.float(), torch.full((33,), 1e-4, device="cuda"), None, None, None, *_seeds(33))
    assert torch.equal(drawn, logits.argmax(dim=1))


def _seeds(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(count, device="cuda")
    return numbers, numbers


def test_the_result_of_a_router_stays_contiguous() -> None:
    """Few features, whatever their number."""
    x, weight = torch.randn(5, 64), torch.randn(60, 64)
    assert library.linear(x, weight, None).is_contiguous()
