"""Where CUTLASS's headers are, and how to get them: the PyPI package nvidia-cutlass, of which only headers are read.

    python -m slipstream_kernels.cuda.cutlass        download and unpack them into the user's cache folder

The package is not a dependency and is never imported: its own dependencies serve a code generator, and headers are
needed only where kernels are built.  A checkout that CUTLASS_PATH names (the folder that has include/) goes first.
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
# Without NDEBUG device assertions are calls, and the compiler serialises wgmma around them. The name of a library
# built with CUTLASS must not depend on where the headers lie: these flags are all that stands for them.
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
    """Why nothing can be built with CUTLASS here; None if it can."""
    return None if find_headers() is not None else f"CUTLASS's headers: {_advice()}"


def include_folder() -> Path:
    """find_headers, or a KernelBuildError that says how to get them."""
    headers = find_headers()
    if headers is None:
        raise KernelBuildError(f"CUTLASS's headers were not found: {_advice()}")
    return headers


@cache
def load_all(source: str, variants: tuple[tuple[str, ...], ...]) -> tuple[ctypes.CDLL, ...]:
    """The libraries of some variants; those that must be built are built at once, so that none has to be later."""
    with ThreadPoolExecutor(len(variants)) as pool:
        return tuple(pool.map(lambda defines: load(source, defines, FLAGS, include_folder), variants))


def fetch() -> Path:
    """Download the package with pip and unpack its headers into the cache folder; the folder they are in."""
    folder = _unpacked()
    if find_headers() is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{PACKAGE}=={VERSION}"]
            subprocess.run([*pip, "--dest", scratch], check=True)
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
