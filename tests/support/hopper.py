"""Support for tests of CUDA kernels: the Hopper GPU, and checks of compiler reports without a GPU."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import kernel_manifest
import pytest
import torch
from slipstream_kernels.cuda import build

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")


def hopper_device() -> torch.device:
    """The GPU that kernels are built for and run on; skips the test without a GPU or compiler."""
    if not IS_HOPPER:
        pytest.skip("no Hopper GPU")
    require_nvcc()
    return torch.device("cuda")


def require_nvcc() -> Path:
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    return nvcc


def assert_compiles_well(source: str, defines: Sequence[str]) -> None:
    """Assert that no kernel of the library spills registers or serialises wgmma, and that each uses the recorded number
    of registers."""
    command = [str(require_nvcc()), *build.FLAGS, *(f"-D{define}" for define in defines), "-Xptxas=-v"]
    command += [*(f"-I{path}" for path in build.include_folders()), *build.library_flags(require_nvcc())]
    command += [str(build.SOURCE_FOLDER / source)]
    with tempfile.TemporaryDirectory() as folder:
        command += ["-o", f"{folder}/kernel.so"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=build.MAX_COMPILE_S)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-3000:]
    found = kernel_manifest.read_report(report)
    assert found.registers and not found.spilled_bytes and not found.warnings, report
    recorded = kernel_manifest.recorded((source, tuple(defines)))
    assert recorded is None or recorded == (list(found.registers), 0), kernel_manifest.REMAKE
