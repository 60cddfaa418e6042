"""Weight-streaming products: right against fp64 for every variant, the same every run, and what is refused."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hopper import assert_compiles_well, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.cuda import build
from slipstream_kernels.gemm.choose import variant_of
from slipstream_kernels.gemm.cuda import skinny_gemm as cuda_stream
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product
from stream_cases import Case, assert_chain_in_a_graph_is_right, draw_case, exact, poison_result, tolerance

FORMATS = ("plain", "channel", "block", "int8")
# out, in: several passes and a last one that is not full; rows that end inside a chunk; fewer rows than SMs
SHAPES = [(6144, 4096), (1000, 4224), (128, 128), (28672, 1024)]
TOKENS = (1, 3, 8, 9, 16)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_right(weights: str, gated: bool, dtype: torch.dtype) -> None:
    case = draw_case(Case(5, 48, 256, weights, gated, dtype), torch.device("cpu"))
    y = ops.skinny_gemm(*case.operands, gated=gated)
    expected = exact(case)
    assert y.dtype == dtype and ((y.double() - expected).abs() <= tolerance(case, expected)).all()


@needs_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_is_right_for_every_variant(
    dtype: torch.dtype, weights: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_tokens, (out_features, in_features), is_queued in itertools.product(TOKENS, SHAPES, (False, True)):
        case = draw_case(Case(num_tokens, out_features, in_features, weights, gated, dtype), torch.device("cuda"))
        expected = exact(case)
        for variant in variants(num_tokens, in_features, is_queued):
            monkeypatch.setattr(cuda_stream, "choose", lambda *_, variant=variant: variant)
            poison_result(case.what)
            y = ops.skinny_gemm(*case.operands, gated=gated, backend="cuda")
            error = (y.double() - expected).abs() - tolerance(case, expected)
            assert (error <= 0).all(), f"{variant}, {case.what}: {error.max()} at {error.argmax()}"


def variants(num_tokens: int, in_features: int, is_queued: bool) -> Iterator[cuda_stream.Variant]:
    """All that can serve such a product."""
    for tiles in cuda_stream.RELOADED_TILES:
        yield cuda_stream.Variant(tiles, -(-num_tokens // 8), False, is_queued)
    if num_tokens <= cuda_stream.MAX_RESIDENT_TOKENS and in_features <= cuda_stream.MAX_RESIDENT_FEATURES:
        for tiles in cuda_stream.RESIDENT_TILES:
            yield cuda_stream.Variant(tiles, 1, True, is_queued)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e4m3_code_is_exact(dtype: torch.dtype) -> None:
    """Row n of the weight is code n alone, subnormals included; the last two codes of each sign are NaN, left out."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[codes & 0x7F == 0x7F] = 0
    weight = torch.zeros(256, 128, dtype=torch.uint8, device="cuda")
    weight[:, 77] = codes
    x = torch.zeros(1, 128, dtype=dtype, device="cuda")
    x[0, 77] = 1.0
    y = ops.skinny_gemm(x, weight.view(torch.float8_e4m3fn), torch.ones(256, device="cuda"), backend="cuda")
    assert torch.equal(y[0], codes.view(torch.float8_e4m3fn).to(dtype))


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_int8_code_is_exact(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.int8)
    weight = torch.zeros(256, 128, dtype=torch.int8, device="cuda")
    x = torch.zeros(1, 128, dtype=dtype, device="cuda")
    for column in (0, 33, 77, 127):
        weight.zero_()[:, column] = codes
        x.zero_()[0, column] = 1.0
        assert torch.equal(
            ops.skinny_gemm(x, weight, torch.ones(256, device="cuda"), backend="cuda")[0], codes.to(dtype)
        )


@needs_hopper
@pytest.mark.parametrize("magnitude", [2.0**-100, 1e-20, 1.0, 1e5, 1e25])
def test_fp8_weights_take_every_magnitude_of_bf16(magnitude: float) -> None:
    """Their products are in fp16; tokens differ in size by 1e6, and one is zero."""
    case = draw_case(Case(8, 256, 4096, "channel", False, torch.bfloat16), torch.device("cuda"))
    x, weight, scales, _ = case.operands
    x = x * torch.logspace(0, 6, 8, device="cuda").bfloat16()[:, None] * magnitude
    x[3] = 0.0
    x[5, 100] = x[5].abs().max() * 2**15  # one outlier
    y = ops.skinny_gemm(x, weight, scales, backend="cuda").double()
    expected = x.double() @ (weight.double() * scales.double()[:, None]).t()
    assert (y[3] == 0).all()
    others = [token for token in range(8) if token != 3]
    error = (y - expected)[others].norm(dim=1) / expected[others].norm(dim=1)
    assert error.max() < 3e-3, error


@needs_hopper
@pytest.mark.parametrize("weights", FORMATS)
def test_same_bits_alone_in_a_batch_and_in_every_run(weights: str) -> None:
    case = draw_case(Case(8, 6144, 4096, weights, False, torch.bfloat16), torch.device("cuda"))
    x, *rest = case.operands
    whole = ops.skinny_gemm(x, *rest, backend="cuda")
    for token in (0, 5):
        assert torch.equal(ops.skinny_gemm(x[token : token + 1], *rest, backend="cuda")[0], whole[token])
    assert all(torch.equal(ops.skinny_gemm(x, *rest, backend="cuda"), whole) for _ in range(20))


@needs_hopper
def test_a_chain_in_a_graph_sees_what_the_kernel_before_wrote() -> None:
    assert_chain_in_a_graph_is_right(partial(ops.skinny_gemm, backend="cuda"), num_tokens=4, features=512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 100)}, "x: shape"),
        ({"x": torch.zeros(64, 2).t()}, "x: last dimension"),
        ({"x": torch.zeros(2, 64, dtype=torch.int8)}, "x: dtype"),
        ({"weight": torch.zeros(32, 64).bfloat16()}, "weight: dtype torch.bfloat16, expected x's"),
        ({"weight": torch.zeros(32, 64, dtype=torch.int16)}, "weight: dtype torch.int16, expected"),
        ({"weight": torch.zeros(32, 64, dtype=torch.int8)}, "scales: a weight of torch.int8 needs"),
        ({"weight": torch.zeros(32, 64, dtype=torch.int8), "scales": torch.ones(1, 4)}, "scales: shape"),
        ({"weight": torch.zeros(64, 32).t()}, "weight: shape"),
        ({"scales": torch.ones(32)}, "scales: a weight of torch.float32 has none"),
        ({"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}, "scales: a weight of torch.float8_e4m3fn needs"),
        ({"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn), "scales": torch.ones(31)}, "scales: shape"),
        ({"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn), "scales": torch.ones(1, 4)}, "multiple of 128"),
        ({"bias": torch.zeros(31)}, "bias: shape"),
        ({"bias": torch.zeros(32).half()}, "bias: dtype"),
        ({"weight": torch.zeros(33, 64), "gated": True}, "weight: 33 rows"),
        ({"backend": "triton"}, "backend: 'triton'"),
        ({"backend": "cuda"}, "backend: cuda cannot run skinny_gemm: x is on cpu"),
    ],
)
def test_refuses_by_name(change: dict[str, object], message: str) -> None:
    call = {"x": torch.zeros(2, 64), "weight": torch.zeros(32, 64), **change}
    with pytest.raises(ValueError, match=message):
        ops.skinny_gemm(**call)


def test_is_chosen_on_hopper_only() -> None:
    weight = torch.zeros(32, 64)
    product = Product(ops.plain_weight(weight).kind, 1, PLAIN_ROWS, weight.dtype)
    assert variant_of(product).kernel == "library"
    assert "x is on cpu" in (cuda_stream.refusal(weight, weight, None) or "")


def test_choice_is_compiled_and_in_one_pass_where_it_can_be() -> None:
    for num_tokens, num_outputs, in_features, gated in itertools.product(
        (1, 8, 9, 16), (16, 4096, 6144, 14336, 128256), (1024, 4096, 14336), (False, True)
    ):
        variant = cuda_stream.choose(num_tokens, num_outputs, in_features, gated, 132)
        assert variant in variants(num_tokens, in_features, variant.is_queued)
        makes_one_pass = variant.tiles * (8 if gated else 16) * 132 >= num_outputs
        assert makes_one_pass or variant.tiles == cuda_stream.TILES_OF_PASSES
        assert not (makes_one_pass and variant.is_queued)


@pytest.mark.parametrize("shape", [(4096, 4096, 132), (6144, 4096, 132), (1000, 4160, 7), (130, 128, 132)])
def test_walk_brings_every_byte_once(shape: tuple[int, int, int], walk_check: Path) -> None:
    done = subprocess.run([walk_check, *map(str, shape)], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 10 and "bad" not in done.stdout, done.stdout


@pytest.fixture(scope="module")
def walk_check(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("walk") / "check"
    source = root / "tests" / "kernels" / "skinny_gemm_walk_check.cc"
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    include = build.DEVICE_CODE
    subprocess.run([compiler, *flags, f"-I{include}", str(source), "-o", str(program)], check=True)
    return program


def test_compiles_without_spills() -> None:
    assert_compiles_well(cuda_stream.SOURCE, cuda_stream.defines(torch.bfloat16, torch.float8_e4m3fn, False))
