"""The server's end of the engine's socket: what it keeps for an engine that does not read, and of large frames."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def run(name: str, folder: Path, root: Path) -> list[int]:
    """The numbers that a program of this folder prints."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, backend, fuzz = folder / name, root / "backend/triton", root / "tests/fuzz"
    sources = [root / f"tests/unit/{name}.cc", backend / "engine_socket.cc", backend / "wire.cc", fuzz / "fake_api.cc"]
    flags = ["-O1", "-std=c++17", f"-I{backend}", f"-I{fuzz}", "-pthread"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60)
    return [int(number) for number in done.stdout.split()]


def test_a_backlog_that_never_ends_takes_no_more_memory_than_it_has_bytes(tmp_path: Path, root: Path) -> None:
    num_grown, num_read = run("engine_link_backlog", tmp_path, root)
    assert num_read == 284 << 20
    assert num_grown < 64 << 20, "16 MiB are unread, all that is kept beside them has been sent"


def test_a_large_frame_leaves_nothing(tmp_path: Path, root: Path) -> None:
    [num_grown] = run("engine_link_large_frame", tmp_path, root)
    assert num_grown < 1 << 20
