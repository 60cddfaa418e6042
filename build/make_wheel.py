"""Make a wheel that holds the Python packages, the C++ backend, the kernels in CUDA and the chat page's libraries.

    .venv/bin/python build/make_wheel.py --out dist
    .venv/bin/python build/make_wheel.py --kernels none                       # in seconds: kernels as sources only
    .venv/bin/python build/make_wheel.py --kernels sm90_sample.cu,sm90_decode_attention.cu     # the libraries of these

All kernels take nvcc 20 minutes of one core, once: they are kept in the user's cache folder, as are CUTLASS's headers,
which are downloaded once.  No GPU is needed.

Its platform tag is that of this machine (linux_x86_64): the backend needs a glibc and libstdc++ as new as those here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from compile_backend import LIBRARY, compile_backend
from page_libraries import add_page_libraries
from slipstream_kernels.cuda import cutlass
from slipstream_kernels.cuda.write_prebuilt import write_prebuilt

ROOT = Path(__file__).resolve().parent.parent
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def make_wheel(out: Path, compiled: Path, kernels: str) -> Path:
    """compiled: where the compiled library is kept between calls.  kernels: "all", "none" or names of sources.

    Raises RuntimeError, ValueError of an unknown source.
    """
    library = compile_backend(compiled)
    if why := add_page_libraries():
        print(f"the chat page of this wheel will show answers as plain text: {why}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        tree, made = Path(folder) / "tree", Path(folder) / "made"
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            tree.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, tree)
        for name in ("backend", "kernels"):
            shutil.copytree(ROOT / name, tree / name, ignore=_SKIPPED)
        native = tree / "backend/slipstream/native"
        native.mkdir()
        shutil.copy2(library, native / LIBRARY)
        if kernels != "none":
            sources = () if kernels == "all" else kernels.split(",")
            if not sources:
                cutlass.fetch()
            write_prebuilt(tree / "kernels/slipstream_kernels/prebuilt", sources)
        platform = f"--config-settings=--build-option=--plat-name={sysconfig.get_platform()}"
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", platform, "-w", str(made), str(tree)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"pip wheel failed:\n{done.stdout}{done.stderr}")
        [wheel] = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, out / wheel.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (%(default)s)")
    parser.add_argument(
        "--kernels", default="all", help="kernels in CUDA to compile: all, none, or names of sources (%(default)s)"
    )
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    os.chdir(ROOT)
    try:
        print(make_wheel(out, ROOT / "install/backends/slipstream", arguments.kernels))
    except (RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
