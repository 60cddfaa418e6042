"""Builds CUDA sources into libraries with a plain C interface, and loads them with ctypes.

ctypes and not pybind11: no framework or Python header is compiled, so a kernel builds in seconds and one library fits
every Python and torch.  Libraries are cached under the user's cache folder by source, flags and architecture.
`python -m slipstream_kernels.cuda.build` builds all variants of the attention kernels ahead of time.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parent
ARCHITECTURE = "sm_90a"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    # Variants hold functions of the same name: none may be seen from, or merged with, another library.
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique",
    "-gencode=arch=compute_90a,code=sm_90a",
)
MAX_COMPILE_S = 180


class KernelBuildError(RuntimeError):
    """A CUDA kernel could not be built; the text says what to install, or holds the compiler's messages."""


def cache_folder() -> Path:
    """Where built libraries are kept: slipstream/kernels under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream" / "kernels"


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


def build(source: str, defines: Sequence[str], folder: Path | None = None) -> Path:
    """Return the library of `source` (a file beside this one) compiled with `defines`, building it if need be.

    Raises KernelBuildError if there is no nvcc, or it fails or takes longer than MAX_COMPILE_S.
    """
    flags = _flags(defines)
    folder = folder or cache_folder()
    library = folder / _library_name(source, flags)
    if library.exists():
        return library
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError(
            f"nvcc: not on PATH, in /usr/local/cuda*/bin or in the package nvidia-cuda-nvcc; {source} cannot be built"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(f"{folder}: cannot hold built kernels: {error}; set XDG_CACHE_HOME") from error
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Built aside and moved into place, so that another process never loads half a library.
        built = Path(scratch) / library.name
        _compile([str(nvcc), *flags, f"-I{SOURCE_FOLDER / 'include'}", "-o", str(built), str(SOURCE_FOLDER / source)])
        os.replace(built, library)
    return library


@cache
def load(source: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    """Build if need be, and load into this process."""
    return ctypes.CDLL(str(build(source, defines)))


@cache
def missing(source: str, defines: tuple[str, ...]) -> str | None:
    """Why `source` can be neither loaded from the cache nor built here; None if it can."""
    if find_nvcc() is not None or (cache_folder() / _library_name(source, _flags(defines))).exists():
        return None
    return "nvcc is not installed, and no library built before is in the cache"


def _flags(defines: Sequence[str]) -> tuple[str, ...]:
    return (*FLAGS, *(f"-D{define}" for define in defines))


def _library_name(source: str, flags: Sequence[str]) -> str:
    return f"{Path(source).stem}-{ARCHITECTURE}-{_digest(source, flags)}.so"


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_COMPILE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"nvcc: no result after {MAX_COMPILE_S} s: {' '.join(command)}") from error
    if done.returncode != 0:
        raise KernelBuildError(f"nvcc: {' '.join(command)}\n{done.stdout}{done.stderr}")


def _digest(source: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(flags).encode())
    headers = sorted((SOURCE_FOLDER / "include").glob("*.*h"))
    for path in [SOURCE_FOLDER / source, *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _main() -> None:
    from slipstream_kernels.cuda import decode_attention, prefill_attention

    parser = argparse.ArgumentParser(description="Build all variants of the CUDA kernels into the user's cache folder.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    jobs = parser.parse_args().jobs
    kernels = (prefill_attention, decode_attention)
    wanted = [(kernel.SOURCE, defines) for kernel in kernels for defines in kernel.variants()]
    with ThreadPoolExecutor(jobs) as pool:
        for library in pool.map(lambda job: build(*job), wanted):
            print(library)


if __name__ == "__main__":
    _main()
