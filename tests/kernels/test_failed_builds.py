"""A kernel in CUDA that cannot be built or loaded: its products go to another by name, with one warning.

The GPU is faked: kernels in CUDA fail as their libraries would, and the others answer with their names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from decode_cases import make_case
from latent_cases import make_latent_case
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import decode_attention, latent_attention, prefill_attention, verify_attention
from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.build import KernelBuildError
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm import choose as dense
from slipstream_kernels.gemm import linear
from slipstream_kernels.gemm.cuda import int4_mm, int8_mm, skinny_gemm, w4a8_mm
from slipstream_kernels.gemm.product import FP8_ROWS, PLAIN_ROWS, WeightKind
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.kernel_choice import Kernel, ThisDevice, always
from slipstream_kernels.moe import choose as moe
from slipstream_kernels.moe import grouped_linear
from slipstream_kernels.moe.cuda import grouped_gemm, grouped_mxfp4_gemm, grouped_w4a8_gemm, grouped_w4a16_gemm
from slipstream_kernels.sample.cuda import sample

CPU, BF16 = torch.device("cpu"), torch.bfloat16
IN_CUDA = {
    "skinny_gemm", "swap_ab_gemm", "swap_ab_stream", "mixed_gemm", "mixed_gemm_pairs", "skinny_gemm_w4a16",
    "mixed_gemm_w4a16", "stream_w4a16", "mixed_gemm_w4a8", "stream_w4a8", "w4a8_gemm", "int8_gemm",
    "grouped_mxfp4_gemm", "grouped_mxfp4_wide", "grouped_stream",
}  # fmt: skip
Answer = str  # of a fake kernel: its name
Kernels = dict[str, Kernel]


class Hopper(ThisDevice):
    """A GPU that is not there."""

    def __init__(self, kernels: dict[str, Kernel]) -> None:
        self.name, self.num_sms, self._kernels = "NVIDIA H200", 132, kernels
        self._given_up = {}


def fake_kernels(
    real: dict[str, Kernel], failing: Collection[str], configures: Collection[str] = ()
) -> dict[str, Kernel]:
    """failing: those that fail as they run; configures: already as their variant is chosen."""

    def fake(name: str) -> Kernel:
        def fail(*_: object) -> Any:
            raise KernelBuildError(f"nvcc: {name}: out of memory")

        def answer(*_: object) -> Answer:
            return name

        configure: Callable = fail if name in configures else lambda product, device: ()
        return Kernel(fail if name in failing else answer, configure=configure, gates=always)  # type: ignore[arg-type]

    return {name: fake(name) for name in real}


def use(monkeypatch: pytest.MonkeyPatch, choose: ModuleType, caller: ModuleType, kernels: dict[str, Kernel]) -> None:
    device = Hopper(kernels)
    for module in (choose, caller):
        monkeypatch.setattr(module, "KERNELS", kernels)
        monkeypatch.setattr(module, "this_device", lambda _: device)
    choose.variant_of.cache_clear()


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    dense.variant_of.cache_clear()
    moe.variant_of.cache_clear()


def product(kind: WeightKind, num_rows: int, rows: str = PLAIN_ROWS, gated: bool = False) -> Answer:
    """The kernel that answers at last."""
    x: Any = torch.zeros(num_rows, kind.in_features, dtype=BF16)
    if rows == FP8_ROWS:
        x = linear.Fp8Rows(x.to(E4M3), torch.ones(num_rows), BF16, num_rows)
    weight: Any = SimpleNamespace(kind=kind, order=None)
    answer: Any = linear._multiply(x, weight, gated=gated)[0]
    return answer


@pytest.mark.parametrize(
    ("kind", "num_rows", "rows", "gated", "first", "last"),
    [
        (("plain", BF16), 4, PLAIN_ROWS, False, "skinny_gemm", "library"),
        (("plain", BF16), 40, PLAIN_ROWS, True, "swap_ab_gemm", "library"),
        (("fp8", E4M3), 20, FP8_ROWS, True, "swap_ab_gemm", "scaled_mm"),
        (("fp8", E4M3), 100, FP8_ROWS, False, "swap_ab_stream", "library"),
        (("fp8_block", E4M3), 40, FP8_ROWS, True, "swap_ab_gemm", "scaled_mm"),
        (("int8", torch.int8), 4, PLAIN_ROWS, False, "skinny_gemm", "int8_mm"),
        (("w8a16", torch.int32), 100, PLAIN_ROWS, False, "mixed_gemm", "int8_dequantise+library"),
        (("w4a16", torch.int32), 4, PLAIN_ROWS, False, "mixed_gemm_pairs", "int4_dequantise+library"),
        (("w4a16", torch.uint8), 4, PLAIN_ROWS, False, "skinny_gemm_w4a16", "int4_dequantise+library"),
        (("w4a16", torch.uint8), 40, PLAIN_ROWS, False, "mixed_gemm_w4a16", "int4_dequantise+library"),
        (("w4a16", torch.uint8), 100, PLAIN_ROWS, False, "stream_w4a16", "int4_dequantise+library"),
        (("w4a8", torch.uint8), 40, FP8_ROWS, False, "mixed_gemm_w4a8", "mixed_gemm_w4a8_parts"),
        (("w4a8", torch.int64), 130, FP8_ROWS, False, "stream_w4a8", "mixed_gemm_w4a8_parts"),
    ],
)
@pytest.mark.parametrize("fails_early", [False, True])
def test_dense_products_fall_back_by_name(
    kind: tuple[str, torch.dtype], num_rows: int, rows: str, gated: bool, first: str, last: str, fails_early: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """fails_early: as the variant is chosen, which counts clusters on the GPU."""
    out_features, in_features = 20480 if gated else 4096, 8192 if first == "swap_ab_stream" else 4096
    weight = WeightKind(kind[0], out_features, in_features, kind[1], CPU, 128, rows)
    use(monkeypatch, dense, linear, fake_kernels(dict(dense.KERNELS), ()))
    assert product(weight, num_rows, rows, gated) == first
    failing = fake_kernels(dict(dense.KERNELS), IN_CUDA, IN_CUDA if fails_early else ())
    use(monkeypatch, dense, linear, failing)
    assert [product(weight, num_rows, rows, gated) for _ in range(3)] == [last] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [warning for warning in warnings if f"kernel {first} of {kind[0]} weights" in warning], warnings
    assert len(warnings) == len(set(warnings))
    assert product(weight._replace(out_features=8192), num_rows, rows, gated) == last
    assert len(caplog.records) == len(warnings), "other sizes have the same library"


def test_where_nothing_is_left_every_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = fake_kernels(dict(dense.KERNELS), {*IN_CUDA, "library"})
    use(monkeypatch, dense, linear, kernels)
    weight = WeightKind("plain", 4096, 4096, BF16, CPU)
    with pytest.raises(ValueError, match=r"skinny_gemm: it cannot be built.*library: it cannot be built"):
        product(weight, 4)


def test_other_types_keep_a_kernel_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dense, linear, fake_kernels(dict(dense.KERNELS), {"skinny_gemm"}))
    assert product(WeightKind("plain", 64, 64, BF16, CPU), 4) == "library"
    device = dense.this_device(CPU)
    for dtype, is_refused in ((BF16, True), (torch.float16, False)):
        wanted = dense.Product(WeightKind("plain", 64, 64, dtype, CPU), 4, PLAIN_ROWS, dtype)
        assert (device.refusal("skinny_gemm", wanted) is not None) == is_refused


@pytest.mark.parametrize(
    ("form", "dtype", "first", "last"),
    [
        ("grouped_mxfp4", torch.int32, "grouped_mxfp4_gemm", "dequantise_grouped_mxfp4+grouped_mm"),
        ("plain", BF16, "grouped_stream", "grouped_mm"),
    ],
)
def test_products_of_experts_fall_back_by_name(
    form: str, dtype: torch.dtype, first: str, last: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    use(monkeypatch, moe, grouped_linear, fake_kernels(dict(moe.KERNELS), IN_CUDA))
    kind = WeightKind(form, 64, 64, dtype, CPU, 32, num_experts=4)
    weight: Any = SimpleNamespace(kind=kind, order=None, quant=None)
    routing: Any = SimpleNamespace(num_tokens=12, num_rows=12, num_experts=4, sizes=(12, 12, 4))
    x = torch.zeros(12, 64, dtype=BF16)
    answers = [grouped_linear._multiply(x, weight, routing, False, True)[0] for _ in range(2)]
    assert answers == [last] * 2
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"kernel {first} of {form} weights" in warning and "out of memory" in warning


def canonical(out_features: int = 512, in_features: int = 512) -> Int4Weight:
    groups = in_features // 128
    packed = torch.zeros(out_features, in_features // 2, dtype=torch.uint8)
    return Int4Weight(packed, torch.ones(out_features, groups), None, 128, out_features, in_features)


def call_of(query_lens: list[int]) -> AttentionCall:
    case = make_case(query_lens, [max(query_lens) + 3] * len(query_lens), (8, 2, 128, 64))
    return AttentionCall(*case.arguments(max_seq_len=64), torch.empty_like(case.q))


def latent_call() -> LatentCall:
    case = make_latent_case([1], [64], sizes=(16, 512, 64, 64), dtype=BF16, device=CPU)
    out = torch.empty(*case.q.shape[:2], latent_attention.RANK, dtype=BF16)
    return LatentCall(*case.arguments(), 1.0, out)


def verify_refusal() -> str | None:
    """It has no words of its own: another kernel takes the call."""
    call = call_of([12])
    return None if verify_attention.takes(call) else f"{verify_attention.SOURCE} cannot be built"


@pytest.mark.parametrize(
    ("module", "refusal"),
    [
        (decode_attention, lambda: decode_attention.refusal(call_of([1, 1]))),
        (verify_attention, verify_refusal),
        (prefill_attention, lambda: prefill_attention.refusal(call_of([40, 70]))),
        (latent_attention, lambda: latent_attention.refusal(latent_call())),
        (sample, lambda: sample.refusal(torch.zeros(4, 64))),
        (skinny_gemm, lambda: skinny_gemm.product_refusal(CPU, BF16, BF16, 8192, False, 4)),
        (int8_mm, lambda: int8_mm.refusal(torch.zeros(512, 512, dtype=torch.int8))),
        (int4_mm, lambda: int4_mm.refusal(canonical())),
        (w4a8_mm, lambda: w4a8_mm.refusal(canonical())),
        (grouped_w4a16_gemm, lambda: grouped_w4a16_gemm.refusal(canonical(1024), 2)),
        (grouped_w4a8_gemm, lambda: grouped_w4a8_gemm.refusal(canonical(1024), 2)),
        (grouped_mxfp4_gemm, lambda: grouped_mxfp4_gemm.refusal(canonical(1024), 2)),
    ],
    ids=[
        "decode",
        "verify",
        "prefill",
        "latent",
        "sample",
        "skinny_gemm",
        "int8",
        "int4",
        "w4a8",
        "experts w4a16",
        "experts w4a8",
        "experts mxfp4",
    ],
)
def test_what_is_chosen_for_good_is_built_first(
    module: ModuleType, refusal: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that only such a kernel could read stay as they are; rows stay those that another kernel takes."""
    monkeypatch.setattr(module, "hopper_refusal", lambda *_: None, raising=False)
    monkeypatch.setattr(grouped_gemm, "refusal", lambda *_: None)  # of the device
    tried: list[str] = []

    def build_refusal(source: str, *_: object) -> str:
        tried.append(source)
        return f"{source} cannot be built"

    monkeypatch.setattr(module, "build_refusal", build_refusal)
    assert refusal() == f"{tried[0]} cannot be built"


def test_headers_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cutlass, "find_headers", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(KernelBuildError, match=r"(?s)pip says .*nvidia-cutlass.*; run `python -m .*or name a checkout"):
        cutlass.fetch()
