"""The libraries that a wheel brings, so that kernels in CUDA run without nvcc: write_prebuilt.py makes them.

They lie in slipstream_kernels/prebuilt under the names of the build cache, which hold a hash of sources and flags: one
of other sources is never found.  toolkit.json says which CUDA version built them.  A library holds launchers and CUDA's
runtime beside its device code, but nothing of torch or Python, so one serves every version of these.
"""

from __future__ import annotations

import json
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
