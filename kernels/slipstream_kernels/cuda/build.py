"""Builds CUDA sources into libraries with a plain C interface, and loads them with ctypes.

ctypes instead of pybind11: without framework or Python headers a kernel builds in seconds and one library serves every
Python and torch.  A library comes from the install (prebuilt.py), else from the user's cache folder, else from nvcc;
its name holds a hash of source, flags and architecture, and in the cache it lies in a folder of the CUDA version that
built it, because a driver does not run those of later ones.
`python -m slipstream_kernels.cuda.build` builds all variants of all kernels ahead of time.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from slipstream_kernels.cuda import prebuilt, toolkit
from slipstream_kernels.cuda.toolkit import find_nvcc

LOG = logging.getLogger(__name__)
DEVICE_CODE = Path(__file__).resolve().parents[1] / "csrc"
SOURCE_FOLDER = DEVICE_CODE / "impls"
ARCHITECTURE = "sm_90a"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    # Variants define functions of the same name, which must not be visible to or merged with other libraries.
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique",
    "-gencode=arch=compute_90a,code=sm_90a",
)
MAX_COMPILE_S = 180
MAX_HEAVY_COMPILE_S = 900  # sources with CUTLASS, which take one minute on an idle core


class KernelBuildError(RuntimeError):
    """A CUDA kernel could not be built or loaded; the text names what to install or quotes the compiler or loader."""


def cache_folder() -> Path:
    """Where built libraries are kept: slipstream/kernels under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream" / "kernels"


def folder_of(version: toolkit.Version) -> Path:
    """Where the cache keeps what this version of CUDA has built."""
    return cache_folder() / f"cuda{version[0]}"


def cached(name: str) -> list[Path]:
    """Libraries of earlier builds that match the name and that the driver runs, those of the newest CUDA first."""
    found = [path for path in cache_folder().glob(f"cuda*/{name}") if path.parent.name[4:].isdigit()]
    usable = [path for path in found if toolkit.driver_refusal((_major(path), 0), "it") is None]
    return sorted(usable, key=_major, reverse=True)


def _major(library: Path) -> int:
    return int(library.parent.name[4:])


def include_folders() -> list[Path]:
    """Include folders of csrc."""
    return [DEVICE_CODE]


def library_flags(nvcc: Path) -> list[str]:
    """Linker flags for CUDA's libraries: PyPI's packages have them in lib, but nvcc searches lib64."""
    root = nvcc.resolve().parents[1]
    is_package = (root / "lib" / "libcudart_static.a").exists() and not (root / "lib64").exists()
    return [f"-L{root / 'lib'}"] if is_package else []


def build(
    source: str,
    defines: Sequence[str],
    folder: Path | None = None,
    *,
    flags: Sequence[str] = (),
    headers: Callable[[], Path] | None = None,
) -> Path:
    """Return the library of `source` (a file in csrc/impls) compiled with `defines`, building it if needed.

    folder: where it is looked for and kept, for whatever driver; None: the cache, where one of any version that the
    driver runs will do.
    flags: additional compiler options.  headers: finds a library's headers (cutlass.include_folder), called only to
    compile.
    Raises KernelBuildError if there is no nvcc, or it fails or takes longer than MAX_COMPILE_S (MAX_HEAVY_COMPILE_S),
    or its result cannot be kept.
    """
    options = _options(defines, flags)
    name = _library_name(source, options)
    for library in cached(name) if folder is None else [folder / name]:
        if library.exists():
            return library
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError(
            f"nvcc: not on PATH, in /usr/local/cuda*/bin or in the package nvidia-cuda-nvcc; {source} cannot be built"
        )
    refusal = toolkit.local_refusal if folder is None else toolkit.compiler_refusal
    if (reason := refusal(nvcc)) is not None:
        raise KernelBuildError(f"{source} cannot be built: {reason}")
    includes = [f"-I{path}" for path in (*include_folders(), *([] if headers is None else [headers()]))]
    command = [str(nvcc), *options, *includes, *library_flags(nvcc), str(SOURCE_FOLDER / source)]
    if headers is not None:
        LOG.info("building %s (%s): about a minute, once", source, " ".join(defines))
    started = time.monotonic()
    if folder is None:
        version = toolkit.nvcc_version(nvcc)
        assert version is not None  # local_refusal has asked
        folder = folder_of(version)
    library = folder / name
    _compile_to(library, command, MAX_COMPILE_S if headers is None else MAX_HEAVY_COMPILE_S)
    LOG.info("built %s in %.0f s", name, time.monotonic() - started)
    return library


def load(
    source: str, defines: tuple[str, ...], flags: tuple[str, ...] = (), headers: Callable[[], Path] | None = None
) -> ctypes.CDLL:
    """Load the library into this process: that of the install, else that of the cache; built if neither has it.

    Raises KernelBuildError if it cannot be built or loaded.
    """
    return _load(source, defines, flags, headers)


@cache  # by all four, however they are passed: a second entry would be a second line in the log
def _load(
    source: str, defines: tuple[str, ...], flags: tuple[str, ...], headers: Callable[[], Path] | None
) -> ctypes.CDLL:
    name = _library_name(source, _options(defines, flags))
    library = prebuilt.find(name)
    origin = "prebuilt" if library is not None else "from the cache"
    if library is None:
        origin = origin if cached(name) else "built here"
        library = build(source, defines, flags=flags, headers=headers)
    LOG.info("kernel %s %s: %s", source, " ".join(defines), origin)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelBuildError(f"{library} cannot be loaded: {error}") from error


@cache
def build_refusal(
    source: str, defines: tuple[str, ...], flags: tuple[str, ...] = (), headers: Callable[[], Path] | None = None
) -> str | None:
    """Why the library cannot be had, although it was tried; None if it is loaded.  Tried once, with a warning."""
    reason = missing(source, defines, flags)
    if reason is not None:
        return reason
    try:
        load(source, defines, flags, headers)
    except KernelBuildError as error:
        LOG.warning(
            "kernel %s %s: %s; another kernel, which is slower, takes its place", source, " ".join(defines), error
        )
        return f"{source} cannot be built or loaded here; the log says why"
    return None


@cache
def missing(source: str, defines: tuple[str, ...], flags: tuple[str, ...] = ()) -> str | None:
    """Why `source` can be neither loaded nor built here; None if it can.  The log warns of a reason once a source."""
    if is_built(source, defines, flags):
        return None
    compiler = toolkit.local_refusal(find_nvcc())
    if compiler is None:
        return None
    brought = prebuilt.refusal() or "this install's prebuilt kernels do not hold it"
    reason = f"{compiler}, {brought}, and no library built before is in the cache"
    _warn(source, reason)
    return reason


@cache
def _warn(source: str, reason: str) -> None:
    LOG.warning("kernel %s: %s; another kernel, which is slower, takes its place", source, reason)


def is_built(source: str, defines: Sequence[str], flags: Sequence[str] = ()) -> bool:
    """Whether the install brings the library or the cache holds it."""
    name = _library_name(source, _options(defines, flags))
    return prebuilt.find(name) is not None or bool(cached(name))


def _options(defines: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    return (*FLAGS, *flags, *(f"-D{define}" for define in defines))


def _library_name(source: str, options: Sequence[str]) -> str:
    return f"{Path(source).stem}-{ARCHITECTURE}-{_digest(source, options)}.so"


def _compile_to(library: Path, command: list[str], max_seconds: int) -> None:
    """In a temporary folder and renamed, so that no other process loads a partial library."""
    folder = library.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            _compile([*command, "-o", str(built)], max_seconds)
            os.replace(built, library)
    except OSError as error:
        raise KernelBuildError(f"{folder}: cannot hold built kernels: {error}; set XDG_CACHE_HOME") from error


def _compile(command: list[str], max_seconds: int) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"nvcc: no result after {max_seconds} s: {' '.join(command)}") from error
    if done.returncode != 0:
        raise KernelBuildError(f"nvcc: {' '.join(command)}\n{done.stdout}{done.stderr}")


def _digest(source: str, options: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(options).encode())
    for path in _files_of(SOURCE_FOLDER / source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _files_of(source: Path) -> list[Path]:
    """The source and our headers that it includes, directly or not; only changes in these rebuild it."""
    found = [source]
    for path in found:
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            header = DEVICE_CODE / name
            if header.exists() and header not in found:
                found.append(header)
    return [source, *sorted(found[1:])]


def _main() -> None:
    from slipstream_kernels.cuda import cutlass
    from slipstream_kernels.cuda.variants import builders, variants

    parser = argparse.ArgumentParser(description="Build all variants of the CUDA kernels into the user's cache folder.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once (%(default)s)")
    if (jobs := parser.parse_args().jobs) < 1:
        parser.error(f"--jobs: {jobs}, accepted: 1 or more")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    wanted = builders()
    if (reason := cutlass.missing()) is not None:
        LOG.warning("without products of many rows by w4a8_fp8 and w8a8_int8 weights: %s", reason)
        wanted = wanted[-len(variants()) :]
    try:
        with ThreadPoolExecutor(jobs) as pool:
            for library in pool.map(lambda one: one[1](), wanted):
                print(library)
    except RuntimeError as error:  # the KernelBuildError of the module that builders import, which is not __main__
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    _main()
