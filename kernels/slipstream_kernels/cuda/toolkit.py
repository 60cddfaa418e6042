"""Finds nvcc, and says which CUDA versions the compiler and the driver of this machine are of.

Libraries are linked with CUDA's runtime.  A driver runs the runtimes of its own major version and of older ones.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

Version = tuple[int, int]
OLDEST_NVCC: Version = (12, 4)
MAX_VERSION_S = 20


@lru_cache
def find_nvcc() -> Path | None:
    """nvcc from PATH, a CUDA toolkit in its usual place, or the PyPI package nvidia-cuda-nvcc."""
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    candidates = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True)
    package = find_spec("nvidia")
    for root in (package.submodule_search_locations or []) if package is not None else []:
        candidates += sorted(Path(root).glob("cu*/bin/nvcc")) + sorted(Path(root).glob("cuda_nvcc/bin/nvcc"))
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


@lru_cache
def nvcc_version(nvcc: Path) -> Version | None:
    """The release that nvcc names; None if it names none."""
    try:
        said = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=MAX_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    return (int(found.group(1)), int(found.group(2))) if found else None


@lru_cache
def driver_version() -> Version | None:
    """The newest CUDA version that the driver takes; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or not version.value:
        return None
    return version.value // 1000, version.value % 1000 // 10


def local_refusal(nvcc: Path | None) -> str | None:
    """Why nvcc cannot build libraries that run here; None if it can."""
    refusal = compiler_refusal(nvcc)
    version = None if nvcc is None else nvcc_version(nvcc)
    return refusal if refusal is not None or version is None else driver_refusal(version, str(nvcc))


def compiler_refusal(nvcc: Path | None) -> str | None:
    """Why nvcc cannot build libraries, wherever they run; None if it can."""
    if nvcc is None:
        return "nvcc is not installed"
    version = nvcc_version(nvcc)
    if version is None:
        return f"{nvcc} does not say its version"
    if version < OLDEST_NVCC:
        return f"{nvcc} is of CUDA {text_of(version)}, older than {text_of(OLDEST_NVCC)}"
    return None


def driver_refusal(version: Version, what: str) -> str | None:
    """Why the driver cannot run what was built with that version of CUDA; None if it can, or there is no driver."""
    driver = driver_version()
    if driver is None or driver[0] >= version[0]:
        return None
    return f"{what} is of CUDA {text_of(version)}, the driver takes {text_of(driver)} at most"


def text_of(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
