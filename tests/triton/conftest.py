"""Fixtures of the tests that run the C++ backend on a real tritonserver with the scripted engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_backend import compile_library, make_backend_dir
from triton_server import find_tritonserver


@pytest.fixture(scope="session")
def fake_backend_dir(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backend directory with this tree's library and the stand-in engine."""
    if find_tritonserver() is None:
        pytest.skip("no tritonserver: nvidia-pytriton is not installed")
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    library = compile_library(root / "install" / "backends" / "slipstream")
    return make_backend_dir(library, tmp_path_factory.mktemp("backends"))
