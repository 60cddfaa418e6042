"""Support for tests of CUDA kernels: the Hopper GPU, and checks of compiler reports without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kernel_manifest
import pytest
import torch
from slipstream_kernels.cuda import build

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# Clusters of so many CTAs that an H200 runs at once, where a CTA takes a multiprocessor.
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 20, 7: 16, 8: 15}
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
    of registers. What has not changed since it was recorded is not compiled again."""
    require_nvcc()
    variant = source, tuple(defines)
    if (before := kernel_manifest.compiled_before(variant)) is not None:
        assert before.registers and not before.spilled_bytes
        return
    found = kernel_manifest.compile_variant(variant)
    assert found.registers and not found.spilled_bytes and not found.warnings, found
    recorded = kernel_manifest.recorded(variant)
    assert recorded is None or recorded[:2] == (list(found.registers), 0), kernel_manifest.REMAKE
