"""Products of a dozen real models go to the kernels that tests/golden/kernel_choices.txt names."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import MagicMock

import kernel_choices
import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.cuda import build
from slipstream_kernels.cuda import device as this_gpu
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm import choose as dense
from slipstream_kernels.gemm import tuning
from slipstream_kernels.gemm.activation_quant import Fp8
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.gemm.limits import written_out_bytes
from slipstream_kernels.gemm.product import FP8_ROWS, INT8_ROWS, PLAIN_ROWS, Product, WeightKind
from slipstream_kernels.integer import W4A8_DTYPE
from slipstream_kernels.moe import choose as moe
from slipstream_kernels.moe import write_outs
from slipstream_kernels.moe.kernels import KERNELS as EXPERT_KERNELS
from slipstream_kernels.moe.product import Product as ExpertProduct
from slipstream_kernels.moe.tuning import H200, MOST_TOKENS

BF16 = torch.bfloat16
# of weights as they lie on a GPU that is no Hopper: format, type, form of the rows, kernel, kernel of experts
ELSEWHERE = [
    ("plain", BF16, PLAIN_ROWS, "library", "grouped_mm"),
    ("fp8", E4M3, FP8_ROWS, "scaled_mm", "grouped_mm"),
    ("fp8_block", E4M3, FP8_ROWS, "scaled_mm", "grouped_mm"),
    ("int8", torch.int8, INT8_ROWS, "int8_mm", "grouped_mm"),
    ("int8", torch.int8, PLAIN_ROWS, "int8_mm", "grouped_mm"),
    ("int4", torch.uint8, PLAIN_ROWS, ("int4_mm", "int4_canonical_dequantise+library"),
     ("grouped_int4_mm", "dequantise_int4_16bit+grouped_mm")),
    ("int4", torch.uint8, FP8_ROWS, "int4_mm", "grouped_int4_mm"),
    ("mxfp4", torch.uint8, PLAIN_ROWS, "int4_mm", ("grouped_int4_mm", "dequantise_mxfp4+grouped_mm")),
]  # fmt: skip


def test_choices_are_those_recorded() -> None:
    """If a change is meant: python tests/support/kernel_choices.py"""
    found, recorded = kernel_choices.table().splitlines(), kernel_choices.GOLDEN.read_text().splitlines()
    changed = [f"- {old}\n+ {new}" for old, new in zip(recorded, found) if old != new]
    assert not changed and len(found) == len(recorded), "\n".join(changed[:5])


def test_the_table_has_all_models_and_kernels() -> None:
    text = kernel_choices.GOLDEN.read_text()
    assert all(text.count(f"{model} ") > 30 for model in kernel_choices.MODELS) and len(kernel_choices.MODELS) >= 12
    for kernel in ("skinny_gemm", "swap_ab_gemm", "mixed_gemm", "mixed_gemm_w4a8", "w4a8_gemm", "skinny_gemm_w4a16",
                   "mixed_gemm_w4a16", "mixed_gemm_pairs", "stream_w4a8", "stream_w4a16", "scaled_mm", "library",
                   "grouped_w4a8_gemm"):  # fmt: skip
        assert f" {kernel}" in text


def test_kernels_count_the_clusters_that_choices_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each is asked how many CTAs of its library run at once; here libraries answer none."""
    asked: dict[str, tuple[Product, tuple[int, ...]]] = {}

    def count(self: object, kernel: str, product: Product, config: tuple[int, ...]) -> int:
        asked.setdefault(kernel, (product, config))
        return 0

    monkeypatch.setattr(kernel_choices.Hopper, "count_clusters", count)
    for form in kernel_choices.FORMS.values():
        for num_rows in kernel_choices.ROWS:
            for sizes in ((8192, 8192), (4096, 14336)):
                kernel_choices.chosen(form, num_rows, kernel_choices.Product(*sizes), 132)
    nothing = KERNELS["library"].count_clusters
    assert set(asked) == {name for name, kernel in KERNELS.items() if kernel.count_clusters is not nothing}
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for kernel, (product, config) in asked.items():
        library = MagicMock()
        for symbol in ("mixed_gemm_clusters", "count_clusters", "count_ctas"):
            getattr(library, f"slipstream_{symbol}").return_value = 0
        monkeypatch.setattr(build, "_load", lambda *name, found=library: found)
        assert KERNELS[kernel].count_clusters(product, config) == 0 and library.mock_calls, kernel


class Gpu:
    """A GPU of this machine as its kernels see it, but for its properties."""

    def __init__(self, kernels: dict, num_sms: int) -> None:
        self.name, self.num_sms, self._kernels = "NVIDIA", num_sms, kernels

    def refusal(self, kernel: str, product: object) -> str | None:
        return self._kernels[kernel].refusal(product)

    def count_clusters(self, kernel: str, product: object, config: tuple[int, ...]) -> int:
        raise AssertionError(f"{kernel} has no clusters here")


@pytest.mark.parametrize(("form", "dtype", "rows", "kernel", "experts"), ELSEWHERE)
@pytest.mark.parametrize(("capability", "num_sms"), [((8, 9), 142), ((10, 0), 148), ((12, 0), 170)])
def test_other_gpus_multiply_by_triton_lang_and_cublas(
    form: str,
    dtype: torch.dtype,
    rows: str,
    kernel: str | tuple[str, ...],
    experts: str | tuple[str, ...],
    capability: tuple[int, int],
    num_sms: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = 1 + capability[0]  # answers are kept by device: none that this machine has
    device = torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ops.fp8_refusal(device, BF16) is None and "bfloat16" in (ops.fp8_refusal(device, torch.float16) or "")
    group = 128 if form == "fp8_block" else 32
    kind = WeightKind(form, 4096, 4096, dtype, device, group, rows)
    try:
        for num_rows in kernel_choices.ROWS:
            chosen = dense.choose(Product(kind, num_rows, rows, BF16), Gpu(KERNELS, num_sms))
            assert chosen.kernel in ((kernel,) if isinstance(kernel, str) else kernel), f"{num_rows} rows"
            product = ExpertProduct(kind._replace(num_experts=8), num_rows, 2 * num_rows, BF16)
            name = moe.choose(product, Gpu(EXPERT_KERNELS, num_sms)).kernel
            assert name.endswith(experts), f"{num_rows} rows"
    finally:
        this_gpu.is_hopper.cache_clear()


def kind_of(form: str, dtype: torch.dtype, size: tuple[int, int, int], num_experts: int = 0) -> WeightKind:
    """size: output features (of an expert), input features, of a group."""
    out_features, in_features, group_size = size
    device = torch.device("cuda", 30)
    return WeightKind(form, out_features, in_features, dtype, device, group_size, PLAIN_ROWS, num_experts)


def dense_choice(kind: WeightKind, num_rows: int, dtype: torch.dtype, *, gated: bool = False) -> str:
    return dense.choose(Product(kind, num_rows, PLAIN_ROWS, dtype, gated), Gpu(KERNELS, 132)).kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("size", "least"),
    [((4096, 4096, 32), 1), ((2048, 10944, 64), 1), ((24, 4096, 128), 1), ((28672, 4096, 32), 49)],
    ids=str,
)
def test_canonical_4_bits_go_to_the_library(size: tuple[int, int, int], least: int, dtype: torch.dtype) -> None:
    """All rows of narrow weights, many of wide ones."""
    kind = kind_of("int4", torch.uint8, size)
    for gated in (False, True):
        for rows in (1, 48, 49, 160, 1 << 16):
            expected = "int4_canonical_dequantise+library" if rows >= least else "int4_mm"
            assert dense_choice(kind, rows, dtype, gated=gated) == expected, rows
    assert dense_choice(kind, 4096, torch.float32) == "int4_mm", "which multiplies in fp32"
    fixed = kind._replace(deterministic=True)
    assert dense_choice(fixed, 4096, dtype) == "invariant_mm"
    on_fp8 = Product(kind._replace(rows=FP8_ROWS), 4096, FP8_ROWS, BF16)
    assert dense.choose(on_fp8, Gpu(KERNELS, 132)).kernel == "int4_mm"


def experts_choice(kind: WeightKind, num_rows: int, dtype: torch.dtype) -> str:
    """num_rows: of the average expert."""
    product = ExpertProduct(kind, num_rows * kind.num_experts, num_rows * kind.num_experts, dtype, gated=True)
    return moe.choose(product, Gpu(EXPERT_KERNELS, 132)).kernel


FORMS = ("form", "stored", "group", "least", "few", "more", "many")
EXPERTS_IN_4_BITS = [
    (
        "grouped_w4a16", torch.int32, 128, (12, 640),
        "grouped_w4a16_gemm", "grouped_w4a16_wide", "dequantise_w4a16_16bit+grouped_mm",
    ),
    ("int4", torch.uint8, 32, (2, 96), "grouped_int4_mm", "grouped_int4_mm", "dequantise_int4_16bit+grouped_mm"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(FORMS, EXPERTS_IN_4_BITS)
def test_many_rows_of_4_bit_experts_are_multiplied_by_weights_written_out(
    form: str,
    stored: torch.dtype,
    group: int,
    least: tuple[int, int],
    few: str,
    more: str,
    many: str,
    dtype: torch.dtype,
) -> None:
    """least: rows of an expert from which the second and the third kernel are taken."""
    for num_experts in (8, 61):
        kind = kind_of(form, stored, (2816, 2048, group), num_experts)
        rows = (1, least[0] - 1, least[0], least[1] - 1, least[1], 4096)
        chosen = [experts_choice(kind, rows_of_expert, dtype) for rows_of_expert in rows]
        assert chosen == [few, few, more, more, many, many]
    assert experts_choice(kind._replace(deterministic=True), 4096, dtype) == "invariant_grouped_mm"
    assert experts_choice(kind, 4096, torch.float32) == few


@pytest.mark.parametrize(FORMS, EXPERTS_IN_4_BITS)
def test_experts_of_more_than_4_gib_are_not_written_out(
    form: str, stored: torch.dtype, group: int, least: tuple[int, int], few: str, more: str, many: str
) -> None:
    """The memory plan counts what the choice makes."""
    fitting, larger = (kind_of(form, stored, (rows, 2048, group), 256) for rows in (4096, 4128))
    assert experts_choice(fitting, 4096, BF16) == many and experts_choice(larger, 4096, BF16) == more
    sizes = [256 * rows * 2048 for rows in (4096, 4128)]
    assert [written_out_bytes("int4", PLAIN_ROWS, 256, size, BF16) for size in sizes] == [4 << 30, 0]
    assert written_out_bytes("int4", PLAIN_ROWS, 0, sizes[1], BF16) == 2 * sizes[1], "a dense layer has no limit"


@pytest.mark.parametrize(("values", "rows"), write_outs.FORMS)
def test_the_plan_knows_from_how_many_rows_on_experts_are_written_out(values: str, rows: str) -> None:
    stored = {"int4": torch.uint8, "grouped_w4a16": torch.int32, "grouped_w4a8": torch.int64}
    for form in write_outs.FORMS[values, rows]:
        least = write_outs.least_rows_written_out(H200.uses[form, rows])
        kind = kind_of(form, stored.get(form, torch.int32), (2816, 2048, 128 if values == "int4" else 32), 8)
        kind = kind._replace(rows=rows)
        few, many = (experts_choice(kind, min(num_rows, 1 << 20), BF16) for num_rows in (least - 1, least))
        assert "+" not in few and ("+" in many) == (least < MOST_TOKENS), form


def test_the_plan_asks_for_the_form_that_weights_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no GPU is at hand, the fewest rows of all forms count."""

    def is_counted(rows_of_expert: int, fp8_rows: bool = False) -> bool:
        experts = ops.Int4Experts(8, 8 * 2816, 2048, 128, "int4", fp8_rows)
        num_bytes = ops.experts_written_out_bytes(experts, 8 * rows_of_expert, torch.device("cuda"), BF16)
        assert num_bytes in (0, 8 * 2816 * 2048 * (1 if fp8_rows else 2))
        return num_bytes > 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [is_counted(rows) for rows in (95, 96)] == [False, True]
    assert [is_counted(rows, fp8_rows=True) for rows in (127, 128)] == [False, True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **options: empty(*sizes, **options))
    for form, least, fp8_rows in (("int4", 96, False), ("grouped_w4a16", 640, False), ("grouped_w4a8", 512, True)):
        monkeypatch.setattr(write_outs, "expert_form", lambda *_, form=form, **__: (form, None))
        assert [is_counted(rows, fp8_rows) for rows in (least - 1, least)] == [False, True], form


def test_rows_have_sums_for_the_kernels_of_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the number of rows that the device's table multiplies exactly: another GPU's table may have another."""
    packed = torch.empty(8, 64, 128, dtype=W4A8_DTYPE, device="meta")  # [in / 128, out / 16, words of a tile]
    scales, zeros = (torch.empty(1024, device="meta") for _ in range(2))
    weight = ops.int4_weight(packed, scales, zeros, 128, 1024)
    assert weight.is_for_fp8_rows

    def summed_rows() -> int:
        quant = ops.int4_linear_weight(weight, fp8_rows=True).quant
        assert isinstance(quant, Fp8) and quant.scheme.sum_columns == 128
        return quant.scheme.summed_rows

    assert summed_rows() == 128, "a GPU without a table has the H200's"
    other = replace(tuning.H200, exact_features={48: tuning.MOST_ROWS}, narrow_features={})
    monkeypatch.setattr(tuning, "TUNINGS", {**tuning.TUNINGS, "meta": other})
    assert summed_rows() == 64, "mixed_gemm_w4a8 takes them for up to 64 rows of every weight"


def test_gpus_without_fp8_are_refused_by_their_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 6)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        reason = ops.fp8_refusal(torch.device("cuda", 9), BF16)
        assert reason == f"FP8 products need compute capability 8.9, this GPU has 8.{capability[1]}"
