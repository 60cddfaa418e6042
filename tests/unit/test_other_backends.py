"""Whether a library of another backend is in the server's process: by what it exports, whatever its file is called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ENTRY = 'extern "C" void* TRITONBACKEND_ModelInstanceExecute(void*, void**, unsigned) { return nullptr; }\n'


def test_a_backend_is_known_by_its_entry_point(tmp_path: Path, root: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    libraries = {"libtriton_helper.so": "int nothing;\n", "custom_runtime.so": ENTRY}
    for name, text in libraries.items():
        source = tmp_path / f"{name}.cc"
        source.write_text(text)
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / name)], check=True)
    program, backend, fuzz = tmp_path / "program", root / "backend/triton", root / "tests/fuzz"
    sources = [backend / "server_exit.cc", backend / "command_line.cc"]
    sources += [root / "tests/unit/other_backends.cc", fuzz / "fake_api.cc"]
    flags = ["-O1", "-std=c++17", f"-I{backend}", f"-I{fuzz}", "-rdynamic", "-pthread"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program), "-ldl"], check=True)
    loaded = [str(tmp_path / name) for name in libraries]
    done = subprocess.run([str(program), *loaded], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "0", "1"], "alone, beside a library that is no backend, beside one that is"
