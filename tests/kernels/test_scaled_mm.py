"""FP8 products: right against fp64 of the dequantised operands, over odd sizes, with sums that need promotion."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.ops import Fp8Rows, Fp8Scheme
from tolerances import SCALED_MM

SHAPES = [(1, 16, 48), (5, 200, 144), (3, 272, 640)]  # tokens, out, in
BLOCK_SHAPES = [(1, 16, 128), (5, 200, 256), (3, 272, 640)]
# On a GPU also what the kernels are for: several tiles of rows, of features and of splits, rows at a library's edge
GPU_SHAPES = [(1, 4096, 4096), (17, 6144, 4096), (64, 4096, 14336), (33, 4000, 4096), (128, 4096, 4096)]
LIBRARY_TOKENS = [1, 2, 7, 128, 129, 130, 132, 300, 384]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device with FP8 tensor cores")


def weights(out_features: int, in_features: int, is_blockwise: bool, device) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(out_features, in_features, device=device) / in_features**0.5
    weight *= torch.logspace(-1, 1, out_features, device=device)[:, None]
    if not is_blockwise:
        rows = ops.quantize_fp8(weight)
        return rows.values, rows.scales.view(-1)
    values, block = ops.quantize_fp8_blocks(weight)
    scales = ops.block_scales(out_features, in_features, device)
    scales[:, : block.shape[1]] = block
    return values, scales


def exact(rows: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In fp64 from the quantised operands."""
    x, w = dequantised(rows, weight, scales)
    return x @ w.t() if bias is None else x @ w.t() + bias.double()


def dequantised(rows: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = rows.num_tokens
    x = rows.values[:num_tokens].double().unflatten(1, (rows.scales.shape[1], -1))
    x = x * rows.scales[:num_tokens].double()[..., None]
    if scales.dim() == 1:
        return x.flatten(1), weight.double() * scales.double()[:, None]
    blocks = scales.double()[:, : weight.shape[1] // 128].repeat_interleave(128, 1)
    return x.flatten(1), weight.double() * blocks.repeat_interleave(128, 0)[: weight.shape[0]]


def check(
    device, backend: str, shape: tuple[int, int, int], is_blockwise: bool, dtype: torch.dtype, bias: bool
) -> None:
    num_tokens, out_features, in_features = shape
    weight, scales = weights(out_features, in_features, is_blockwise, device)
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    rows = ops.quantize_fp8(x, Fp8Scheme(128 if is_blockwise else 0))
    added = torch.randn(out_features, device=device).to(dtype) if bias else None
    counters = ops.scaled_mm_counters(weight)
    expected = exact(rows, weight, scales, added)
    rtol, atol = SCALED_MM[torch.device(device).type, dtype]
    x64, w64 = dequantised(rows, weight, scales)
    # the library rounds the product before the bias is added
    limit = rtol * (expected.abs() + (x64 @ w64.t()).abs()) + atol * (x64.square() @ w64.square().t()).sqrt()
    for _ in range(2):  # counters are left as they were found
        y = ops.scaled_mm(rows, weight, scales, added, counters=counters, backend=backend)
        assert y.dtype == dtype and not counters.any()
        assert ((y.double() - expected).abs() <= limit).all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("is_blockwise", "shape"), [(b, s) for b in (False, True) for s in (SHAPES, BLOCK_SHAPES)[b]])
def test_small(device, backend, dtype, bias, is_blockwise, shape) -> None:
    check(device, backend, shape, is_blockwise, dtype, bias)


@pytest.mark.parametrize("is_blockwise", [False, True])
def test_rows_beyond_one_tile(device, is_blockwise) -> None:
    check(device, "triton", (130, 96, 1024 if device.type == "cuda" else 128), is_blockwise, torch.float32, bias=False)


@needs_cuda
@pytest.mark.parametrize("is_blockwise", [False, True])
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_served_shapes(backend, shape, is_blockwise) -> None:
    check(torch.device("cuda"), backend, shape, is_blockwise, torch.bfloat16, bias=True)


@needs_cuda
@pytest.mark.parametrize("is_blockwise", [False, True])
@pytest.mark.parametrize("num_tokens", LIBRARY_TOKENS)
@pytest.mark.parametrize("features", [(4096, 4096), (1152, 640)])
def test_library_takes_any_number_of_rows(num_tokens, features, is_blockwise) -> None:
    check(torch.device("cuda"), "auto", (num_tokens, *features), is_blockwise, torch.bfloat16, bias=num_tokens % 2 == 0)
    check(torch.device("cuda"), "library", (num_tokens, *features), is_blockwise, torch.bfloat16, bias=False)


@needs_cuda
@pytest.mark.parametrize("is_blockwise", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 64, 128, 256])
def test_long_sums_of_one_sign_are_promoted(num_tokens, is_blockwise) -> None:
    """Fails with the tensor core's own accumulation: of 16384 non-negative products it loses several per cent."""
    device, in_features = torch.device("cuda"), 16384
    weight, scales = weights(256, in_features, is_blockwise, device)
    weight = weight.float().abs().to(weight.dtype)
    x = torch.rand(num_tokens, in_features, device=device).bfloat16()
    rows = ops.quantize_fp8(x, Fp8Scheme(128 if is_blockwise else 0))
    y = ops.scaled_mm(rows, weight, scales)
    torch.testing.assert_close(y.double(), exact(rows, weight, scales, None), rtol=5e-3, atol=0)


@needs_cuda
def test_rows_do_not_depend_on_their_neighbours() -> None:
    device = torch.device("cuda")
    weight, scales = weights(4096, 4096, True, device)
    x = torch.randn(64, 4096, device=device).bfloat16()
    whole = ops.scaled_mm(ops.quantize_fp8(x, Fp8Scheme(128)), weight, scales)
    for count in (33, 63):  # of one tile: the order of sums is the same
        part = ops.scaled_mm(ops.quantize_fp8(x[:count], Fp8Scheme(128)), weight, scales)
        assert torch.equal(part, whole[:count])


def test_refusals() -> None:
    weight, scales = weights(32, 128, False, torch.device("cpu"))
    rows = ops.quantize_fp8(torch.randn(2, 128))
    with pytest.raises(ValueError, match="weight: shape"):
        ops.scaled_mm(rows, weight[:, :64], scales)
    with pytest.raises(ValueError, match="dtypes"):
        ops.scaled_mm(rows, weight.float(), scales)
    with pytest.raises(ValueError, match=r"rows.scales: shape \(4, 2\), expected \(2, 1\)"):
        grouped = ops.quantize_fp8(torch.randn(2, 256), Fp8Scheme(128))
        ops.scaled_mm(grouped, *weights(32, 256, False, torch.device("cpu")))
    with pytest.raises(ValueError, match=r"scales: shape \(1, 1\), expected \(1, 4\)"):
        ops.scaled_mm(rows, weight, torch.ones(1, 1))
