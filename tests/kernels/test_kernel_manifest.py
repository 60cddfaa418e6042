"""Registers and spills of CUDA kernels are those recorded in tests/golden/cuda_kernels.json: a sample is compiled."""

from __future__ import annotations

import re
from pathlib import Path

import kernel_manifest
import pytest
from hopper import require_nvcc
from slipstream_kernels.cuda import build
from slipstream_kernels.cuda.variants import Variant, on_cutlass, variants

# The first library of sources and formats that compile in a few seconds. Tests of other kernels compare theirs.
SAMPLED = (
    "sm90_prefill_stage.cu",
    "sm90_verify_attention.cu",
    "sm90_latent_attention.cu",
    "sm90_mixed_gemm.cu FORMAT=W8A16",
    "sm90_mixed_gemm.cu FORMAT=W4A8",
    "sm90_mixed_gemm.cu FORMAT=W4A16 ",
    "sm90_mixed_gemm.cu FORMAT=W4A16Sums ",
    "sm90_int4_dequantise.cu",
)
ALWAYS = "sm90_int4_dequantise.cu"  # which compiles soonest, also if it has not changed: a record may be wrong


def test_every_library_is_recorded() -> None:
    recorded = kernel_manifest.load()[1]
    assert set(recorded) == {kernel_manifest.name_of(variant) for variant in (*variants(), *on_cutlass())}
    assert all(one.registers and max(one.registers) <= 255 and one.spilled_bytes >= 0 for one in recorded.values())


def test_the_recorded_compiler_is_the_one_that_make_installs(root: Path) -> None:
    pinned = re.search(r"^nvidia-cuda-nvcc==(\S+)$", (root / "constraints.txt").read_text(), re.M)
    assert pinned and pinned.group(1) == kernel_manifest.load()[0]


@pytest.mark.parametrize("sampled", SAMPLED)
def test_a_sample_compiles_to_what_is_recorded(sampled: str) -> None:
    require_nvcc()
    variant: Variant = next(found for found in variants() if kernel_manifest.name_of(found).startswith(sampled))
    if sampled != ALWAYS and kernel_manifest.compiled_before(variant) is not None:
        return
    recorded = kernel_manifest.recorded(variant)
    if recorded is None:
        pytest.skip(f"nvcc {kernel_manifest.compiler_version()} is not the recorded {kernel_manifest.load()[0]}")
    found = kernel_manifest.compile_variant(variant)
    assert (list(found.registers), found.spilled_bytes) == recorded[:2], kernel_manifest.REMAKE
    assert not found.warnings


def test_what_was_compiled_before_is_not_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with other options or sources, nor by another compiler."""
    source, defines = "sm90_int4_dequantise.cu", ("SLIPSTREAM_ANY",)
    record = kernel_manifest.Recorded([40], 0, kernel_manifest.digest_of((source, defines)))
    libraries = {kernel_manifest.name_of((source, other)): record for other in (defines, ())}
    monkeypatch.delenv("SLIPSTREAM_LONG_TESTS", raising=False)
    monkeypatch.setattr(kernel_manifest, "compiler_version", lambda: "13.0.88")
    monkeypatch.setattr(kernel_manifest, "load", lambda: ("13.0.88", libraries))
    assert kernel_manifest.compiled_before((source, defines)) == record
    assert kernel_manifest.compiled_before((source, ())) is None
    monkeypatch.setattr(build, "_files_of", lambda path: [path, build.SOURCE_FOLDER / "sm90_sample.cu"])
    assert kernel_manifest.compiled_before((source, defines)) is None
    monkeypatch.undo()
    monkeypatch.setattr(kernel_manifest, "compiler_version", lambda: "13.0.89")
    monkeypatch.setattr(kernel_manifest, "load", lambda: ("13.0.88", libraries))
    assert kernel_manifest.compiled_before((source, defines)) is None


def test_reports_are_read() -> None:
    found = kernel_manifest.read_report(
        "ptxas info    : Used 70 registers, used 1 barriers\n"
        "    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 128 registers\nptxas info : (C7510) Potential Performance Loss\n"
    )
    assert found.registers == (128, 70) and found.spilled_bytes == 12 and len(found.warnings) == 1


def test_the_packages_of_nvcc_are_linked_with(tmp_path: Path) -> None:
    """They have the runtime in lib; a toolkit has it in lib64, where its nvcc finds it by itself."""
    nvcc = tmp_path / "bin" / "nvcc"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart_static.a").touch()
    assert build.library_flags(nvcc) == [f"-L{tmp_path / 'lib'}"]
    (tmp_path / "lib64").mkdir()
    assert build.library_flags(nvcc) == []
