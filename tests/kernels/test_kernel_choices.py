"""Products of a dozen real models go to the kernels that tests/golden/kernel_choices.txt names."""

from __future__ import annotations

import kernel_choices


def test_choices_are_those_recorded() -> None:
    """If a change is meant: python tests/support/kernel_choices.py"""
    found, recorded = kernel_choices.table().splitlines(), kernel_choices.GOLDEN.read_text().splitlines()
    changed = [f"- {old}\n+ {new}" for old, new in zip(recorded, found) if old != new]
    assert not changed and len(found) == len(recorded), "\n".join(changed[:5])


def test_the_table_has_all_models_and_kernels() -> None:
    text = kernel_choices.GOLDEN.read_text()
    assert all(text.count(f"{model} ") > 30 for model in kernel_choices.MODELS) and len(kernel_choices.MODELS) >= 12
    for kernel in ("skinny_gemm", "swap_ab_gemm", "mixed_gemm", "mixed_gemm_w4a8", "w4a8_gemm", "skinny_gemm_w4a16",
                   "mixed_gemm_w4a16", "scaled_mm", "library", "grouped_w4a8_gemm", "prefill_attention"):  # fmt: skip
        assert f" {kernel}" in text
