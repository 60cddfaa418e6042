"""head_mm: each head's own product, against fp64."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops
from tolerances import SCALED_MM


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("sizes", [(1, 3, 40, 72), (5, 2, 24, 128), (19, 1, 16, 16), (64, 2, 40, 200)], ids=str)
def test_each_heads_product(
    device: torch.device, sizes: tuple[int, int, int, int], is_transposed: bool, backend: str
) -> None:
    """Strided rows, into a part of wider ones; nothing else of these is written."""
    torch.manual_seed(1)
    num_tokens, num_heads, out_features, in_features = sizes
    drawn = torch.randn(num_heads, out_features + 8, in_features, device=device).bfloat16() * in_features**-0.5
    weight = drawn[:, :out_features]
    if is_transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    x = torch.randn(num_tokens, num_heads, in_features + 8, device=device).bfloat16()[..., :in_features]
    wide = torch.full((num_tokens, num_heads, out_features + 8), 7.0, dtype=x.dtype, device=device)
    found = ops.head_mm(x, weight, wide[..., :out_features], backend=backend)
    assert found.data_ptr() == wide.data_ptr() and (wide[..., out_features:] == 7).all()
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    rtol, atol = SCALED_MM[device.type, x.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=10 * atol)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large products take the interpreter minutes")
@pytest.mark.parametrize("sizes", [(16, 512, 128), (16, 128, 512), (20, 512, 192), (128, 512, 128)], ids=str)
def test_published_sizes(sizes: tuple[int, int, int]) -> None:
    """As the library's, by which more tokens are multiplied, and no tokens at all."""
    num_heads, out_features, in_features = sizes
    weight = torch.randn(num_heads, in_features, out_features, device="cuda").bfloat16().transpose(1, 2)
    for num_tokens in (0, 1, 8, 16, 48, 64, 65, 300):
        x = torch.randn(num_tokens, num_heads, in_features, device="cuda").bfloat16()
        found, library = (
            ops.head_mm(x, weight, x.new_empty(num_tokens, num_heads, out_features), backend=backend)
            for backend in ("auto", "reference")
        )
        torch.testing.assert_close(found, library, rtol=2**-7, atol=0.05)


def test_what_triton_does_not_take_is_named() -> None:
    for num_tokens, num_heads, in_features, dtype in (
        (65, 1, 16, torch.bfloat16),
        (33, 64, 16, torch.bfloat16),
        (1, 1, 1040, torch.bfloat16),
        (1, 1, 16, torch.float32),
    ):
        x = torch.zeros(num_tokens, num_heads, in_features, dtype=dtype)
        weight = x.new_zeros(num_heads, 16, in_features)
        out = x.new_empty(num_tokens, num_heads, 16)
        with pytest.raises(ValueError, match=r"triton cannot run head_mm: .* are more than"):
            ops.head_mm(x, weight, out, backend="triton")
        assert not ops.head_mm(x, weight, out).any()
