"""An engine is started when the server has no descriptors or threads left: the start fails and keeps nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_backend import compile_library, make_backend_dir


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


def test_a_load_that_gets_no_thread_fails_with_the_reason(tmp_path: Path, root: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, fuzz = tmp_path / "few_threads", root / "tests/fuzz"
    sources = [root / "tests/unit/few_threads.cc", fuzz / "fake_api.cc"]
    flags = ["-O1", "-std=c++17", "-rdynamic", f"-I{root / 'backend/triton'}", f"-I{fuzz}", "-pthread", "-ldl"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    library = compile_library(root / "install/backends/slipstream")
    backend = make_backend_dir(library, tmp_path / "backends") / "slipstream"
    done = subprocess.run([str(program), str(library), str(backend)], capture_output=True, text=True, timeout=120)
    *refused, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "loaded"), done.stderr
    assert len(refused) == 6, "two engines have three threads each"
    assert set(refused) == {"1: no thread can be started: Resource temporarily unavailable"}
