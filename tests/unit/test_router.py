"""The order in which the C++ backend tries the engines of a model, and what it remembers of prompts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

EXPECTED = {
    "all equal": "0 1 2",
    "longest ago": "1 2 0",
    "fewest": "2 1 0",
    "known": "2 1 0",  # two requests more than the least count as equal
    "loaded": "1 0 2",  # three do not
    "longest": "1 2 0",
    "down": "2 0 1",
    "least of those that serve": "2 0 1",
    "shared": "0 2 1",  # a beginning of three blocks is not worth a request more than others
    "much shared": "0 2 1",  # one of forty is
    "shared by all": "1 2 0",
    "the same again": "0 1 2",
    "forgotten": "2 0 1",
    "salted": "0 1 2",
    "evicted": "4 8 of 12",  # the beginning of a prompt outlives its end
    "too long": "12",
    "parts": "1 0",
    "most": "4096",
    "bounded": "1",
    "without memory": "1",
}


@pytest.fixture(scope="module")
def printed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, backend = tmp_path_factory.mktemp("router") / "router_cases", root / "backend/triton"
    sources = [root / "tests/unit/router_cases.cc", backend / "router.cc"]
    flags = ["-O1", "-std=c++17", "-Wall", "-Werror", f"-I{backend}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", EXPECTED)
def test_the_router(printed: dict[str, str], name: str) -> None:
    assert printed[name] == EXPECTED[name]
