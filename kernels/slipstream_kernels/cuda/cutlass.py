"""Finds or fetches the headers of CUTLASS: the PyPI package nvidia-cutlass, of which only headers are used.

    python -m slipstream_kernels.cuda.cutlass        download and unpack them into the user's cache folder

The package is not a dependency and is never imported: its own dependencies are for a code generator, and headers are
needed only where kernels are built.  CUTLASS_PATH (a checkout, the folder with include/) takes precedence.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from slipstream_kernels.cuda.build import KernelBuildError, cache_folder, load

PACKAGE, VERSION = "nvidia-cutlass", "4.2.0.0"
HEADERS = "cutlass_library/source/include/"  # in the package
# Without NDEBUG device assertions are calls, around which the compiler serialises wgmma. The cache key of a library
# contains these flags instead of the path of the headers.
FLAGS = (
    "-DNDEBUG",
    "-DCUTLASS_ENABLE_GDC_FOR_SM90=1",
    "--expt-relaxed-constexpr",
    f"-DSLIPSTREAM_CUTLASS_VERSION={VERSION.replace('.', '_')}",
)


def find_headers() -> Path | None:
    """The folder that holds cutlass/ and cute/, or None."""
    candidates = []
    if "CUTLASS_PATH" in os.environ:
        candidates.append(Path(os.environ["CUTLASS_PATH"]) / "include")
    package = find_spec("cutlass_library")
    for root in (package.submodule_search_locations or []) if package is not None else []:
        candidates.append(Path(root) / "source" / "include")
    candidates.append(_unpacked())
    return next((path for path in candidates if (path / "cutlass" / "cutlass.h").is_file()), None)


def missing() -> str | None:
    """Why kernels with CUTLASS cannot be built here; None if they can."""
    return None if find_headers() is not None else f"CUTLASS's headers: {_advice()}"


def include_folder() -> Path:
    """find_headers. Raises KernelBuildError with instructions if there are none."""
    headers = find_headers()
    if headers is None:
        raise KernelBuildError(f"CUTLASS's headers were not found: {_advice()}")
    return headers


@cache
def load_all(source: str, variants: tuple[tuple[str, ...], ...]) -> tuple[ctypes.CDLL, ...]:
    """Load the libraries of these variants; missing ones are built in parallel."""
    with ThreadPoolExecutor(len(variants)) as pool:
        return tuple(pool.map(lambda defines: load(source, defines, FLAGS, include_folder), variants))


def fetch() -> Path:
    """Download the package with pip and unpack its headers into the cache folder. Returns their folder.

    Raises KernelBuildError if pip cannot download it."""
    folder = _unpacked()
    if find_headers() is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{PACKAGE}=={VERSION}"]
            done = subprocess.run([*pip, "--dest", scratch], capture_output=True, text=True, check=False)
            if done.returncode:
                raise KernelBuildError(f"CUTLASS's headers: pip says {done.stderr.strip()}; {_advice()}")
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                members = [name for name in wheel.namelist() if name.startswith(HEADERS)]
                wheel.extractall(scratch, members)
            os.replace(Path(scratch) / HEADERS, folder)
    return find_headers() or folder


def _unpacked() -> Path:
    return cache_folder().parent / f"cutlass-{VERSION}" / "include"


def _advice() -> str:
    return (
        f"run `python -m slipstream_kernels.cuda.cutlass` (downloads {PACKAGE} {VERSION}, 6 MB), "
        "or name a checkout of CUTLASS in CUTLASS_PATH"
    )


if __name__ == "__main__":
    print(fetch())
