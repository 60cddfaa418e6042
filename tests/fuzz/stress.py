"""The C++ backend in a host of its own (stress.cc), beside the stand-in engine: concurrent clients that ask, cancel,
forge handles and crash the engine. ThreadSanitizer can watch it there; it cannot be loaded into a real server.

    python tests/fuzz/stress.py --seconds 60 --sanitize thread
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "build"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/support"))
from compile_backend import LINK, compile_backend, find_compiler
from fake_backend import make_backend_dir

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def compile_host(folder: Path, sanitize: str = "") -> Path:
    """The program of stress.cc, which the library is loaded into. Raises CalledProcessError."""
    program = folder / "stress"
    flags = ["-std=c++17", "-O1", "-g", "-rdynamic", *([f"-fsanitize={sanitize}"] if sanitize else [])]
    sources = [str(FOLDER / name) for name in ("stress.cc", "fake_api.cc")]
    include = [f"-I{ROOT / 'backend/triton'}", f"-I{FOLDER}"]
    subprocess.run([str(find_compiler()), *flags, *include, *sources, "-o", str(program), *LINK], check=True)
    return program


def run_stress(library: Path, program: Path, folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """returncode is 0 when all went well, 66 when ThreadSanitizer reports."""
    backend = make_backend_dir(library, folder / "backends") / "slipstream"
    options = f"exitcode=66 history_size=7 suppressions={FOLDER / 'tsan.supp'}"
    return subprocess.run(
        [str(program), str(library), str(backend), str(seconds)],
        env={**os.environ, "TSAN_OPTIONS": options},
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--sanitize", default="", help="thread or address; default: as the backend is installed")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slipstream-stress-"))
    library = compile_backend(folder, arguments.sanitize)
    done = run_stress(library, compile_host(folder, arguments.sanitize), folder, arguments.seconds)
    print(done.stdout + done.stderr, end="")
    shutil.rmtree(folder)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
