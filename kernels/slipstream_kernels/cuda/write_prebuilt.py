"""Makes the set of libraries that a wheel brings; build/make_wheel.py calls it, and prebuilt.py finds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream_kernels.cuda import build, prebuilt, toolkit
from slipstream_kernels.cuda.variants import builders


def write_prebuilt(out: Path, sources: Sequence[str] = ()) -> int:
    """Build the libraries of these sources, such as sm90_sample.cu (all if empty), and put them stripped into `out`.

    Returns how many.  Raises KernelBuildError if one cannot be built, ValueError if a source is unknown.
    """
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
    (out / prebuilt.TOOLKIT).write_text(json.dumps({"cuda": toolkit.text_of(version)}) + "\n")
    return len(chosen)


def _copy_stripped(library: Path, target: Path) -> None:
    """Without symbols, which are a fourth of a library."""
    shutil.copyfile(library, target)
    if shutil.which("strip") is not None:
        subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)
