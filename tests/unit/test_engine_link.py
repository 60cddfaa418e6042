"""The server's end of the engine's socket: what it keeps for an engine that does not read at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def test_a_backlog_that_never_ends_takes_no_more_memory_than_it_has_bytes(tmp_path: Path, root: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, backend, fuzz = tmp_path / "backlog", root / "backend/triton", root / "tests/fuzz"
    sources = [root / "tests/unit/engine_link_backlog.cc", backend / "engine_socket.cc", backend / "wire.cc"]
    sources.append(fuzz / "fake_api.cc")
    flags = ["-O1", "-std=c++17", f"-I{backend}", f"-I{fuzz}", "-pthread"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60)
    num_grown, num_read = map(int, done.stdout.split())
    assert num_read == 284 << 20
    assert num_grown < 64 << 20, "16 MiB are unread, all that is kept beside them has been sent"
