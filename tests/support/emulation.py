"""CUDA kernels on a CPU: their device code, compiled for the host over tests/support/hopper_emulator."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

from slipstream_kernels.cuda import build

SHIM = Path(__file__).parent / "hopper_emulator"
MAX_SECONDS = 120


def missing() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    if shutil.which("g++") is None:
        return "needs g++"
    return None if cuda_include() else "needs CUDA's headers"


@lru_cache
def cuda_include() -> Path | None:
    nvcc = build.find_nvcc()
    roots = [] if nvcc is None else [nvcc.resolve().parents[1] / "include"]
    roots += sorted(Path("/usr/local").glob("cuda*/include"))
    return next((root for root in roots if (root / "cuda_bf16.h").exists()), None)


@lru_cache
def library(source: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    """Compile hopper_emulator/<source>, the emulator's headers in the place of the device's."""
    folder = Path(mkdtemp(prefix="emulator-"))
    shutil.copytree(build.DEVICE_CODE, folder, dirs_exist_ok=True)
    shutil.copytree(SHIM, folder, dirs_exist_ok=True)
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{folder}", f"-I{cuda_include()}"]
    command = ["g++", *options, *(f"-D{define}" for define in defines), "-o", str(folder / "emulator.so")]
    sources = [str(folder / name) for name in (source, "emulator.cc")]
    subprocess.run([*command, *sources], check=True, timeout=MAX_SECONDS)
    return ctypes.CDLL(str(folder / "emulator.so"))


def run(source: str, defines: tuple[str, ...], params: ctypes.Structure, seed: int) -> None:
    """What a launch with these arguments does, on the CPU.  Raises if the grid's threads deadlock."""
    if library(source, defines).slipstream_emulate(ctypes.byref(params), seed):
        raise RuntimeError("deadlock")
