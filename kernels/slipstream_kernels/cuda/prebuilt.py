"""The libraries that a wheel brings, so that kernels in CUDA run without nvcc: build/make_wheel.py writes them.

They lie in slipstream_kernels/prebuilt under the names of the build cache, which hold a hash of sources and flags: one
of other sources is never found.  toolkit.json says which CUDA version built them.  A library holds launchers and CUDA's
runtime beside its device code, but nothing of torch or Python, so one serves every version of these.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from slipstream_kernels.cuda import toolkit

FOLDER = Path(__file__).resolve().parents[1] / "prebuilt"
TOOLKIT = "toolkit.json"


def find(name: str) -> Path | None:
    """The library of that name, if this install brings it and the driver runs it."""
    library = FOLDER / name
    return library if library.is_file() and refusal() is None else None


@lru_cache
def refusal() -> str | None:
    """Why no library of this install is used; None if they are."""
    version = toolkit_version()
    if version is None:
        return "this install brings no prebuilt kernels"
    return toolkit.driver_refusal(version, "the set of prebuilt kernels")


def toolkit_version() -> toolkit.Version | None:
    """The CUDA version that built this install's libraries; None if it brings none."""
    try:
        major, minor = json.loads((FOLDER / TOOLKIT).read_text())["cuda"].split(".")
    except (OSError, ValueError, KeyError):
        return None
    return int(major), int(minor)


def count() -> int:
    """How many libraries this install brings."""
    return len(list(FOLDER.glob("*.so")))


def write(out: Path, sources: Sequence[str] = ()) -> int:
    """Build the libraries of these sources, such as sm90_sample.cu (all if empty), and put them stripped into `out`.

    Returns how many.  Raises KernelBuildError if one cannot be built, ValueError if a source is unknown.
    """
    from slipstream_kernels.cuda import build
    from slipstream_kernels.cuda.variants import builders

    wanted = builders()
    known = {source for source, _ in wanted}
    if unknown := sorted(set(sources) - known):
        raise ValueError(f"{', '.join(unknown)}: no such source; there are {', '.join(sorted(known))}")
    nvcc = build.find_nvcc()
    version = None if nvcc is None else toolkit.nvcc_version(nvcc)
    if nvcc is None or version is None:
        raise build.KernelBuildError("nvcc is not installed, which builds the kernels")
    out.mkdir(parents=True, exist_ok=True)
    chosen = [make for source, make in wanted if not sources or source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # not of the whole cache: libraries of a later CUDA would not run where this set says that they do
        for library in pool.map(lambda make: make(folder=build.folder_of(version)), chosen):
            _copy_stripped(library, out / library.name)
    (out / TOOLKIT).write_text(json.dumps({"cuda": toolkit.text_of(version)}) + "\n")
    return len(chosen)


def _copy_stripped(library: Path, target: Path) -> None:
    """Without symbols, which are a fourth of a library."""
    shutil.copyfile(library, target)
    if shutil.which("strip") is not None:
        subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)
