"""Compile the C++ backend (backend/triton) into a shared library that tritonserver loads.

    python build/compile_backend.py install/backends/slipstream/libtriton_slipstream.so

Only what changed is compiled again; two files at a time. Needs g++ (C++17) and nothing else: no headers of Triton.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "backend/triton"
OBJECTS = ROOT / "install/obj"
FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread")


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise SystemExit(f"no C++ compiler: {name} is not in PATH (apt install g++)")
    return name


def is_newer(path: Path, than: list[Path]) -> bool:
    return path.exists() and all(path.stat().st_mtime_ns >= other.stat().st_mtime_ns for other in than)


def compile_object(source: Path) -> Path:
    """Object file of one source; kept when it is newer than the source and every header."""
    target = OBJECTS / f"{source.stem}.o"
    headers = sorted(SOURCES.glob("*.h"))
    if not is_newer(target, [source, *headers, Path(__file__)]):
        run([compiler(), *FLAGS, "-c", str(source), "-o", str(target)])
    return target


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr}")


def compile_backend(library: Path) -> None:
    """Bring the library up to date. Raises SystemExit with the compiler's words. Symbols of Triton resolve at load."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_object, sorted(SOURCES.glob("*.cc"))))
    if not is_newer(library, objects):
        partial = library.with_suffix(".partial")  # a server that runs keeps the file it has mapped
        run([compiler(), *FLAGS, "-shared", *map(str, objects), "-o", str(partial)])
        partial.replace(library)


if __name__ == "__main__":
    compile_backend(Path(sys.argv[1]).resolve())
