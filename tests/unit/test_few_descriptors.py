"""An engine is started when the server has no descriptors or threads left: the start fails and keeps nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def test_a_start_that_fails_for_lack_of_resources_keeps_none(tmp_path: Path, root: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, backend, fuzz = tmp_path / "few_descriptors", root / "backend/triton", root / "tests/fuzz"
    sources = [backend / f"{name}.cc" for name in ("engine_process", "engine_socket", "wire")]
    sources += [root / "tests/unit/few_descriptors.cc", fuzz / "fake_api.cc"]
    flags = ["-O1", "-std=c++17", f"-I{backend}", f"-I{fuzz}", "-pthread", "-ldl"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n") == ["done", ""]
