"""Compile the C++ backend into libtriton_slipstream.so with plain g++.

    .venv/bin/python build/compile_backend.py --out DIR [--sanitize thread]

The result is cached by the hash of the sources and the command, so that a second call costs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "backend" / "triton"
LIBRARY = "libtriton_slipstream.so"
OFFICIAL_HEADERS = Path("/opt/tritonserver/include")  # where the official image has them
FLAGS = ["-O2", "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-isystem", str(OFFICIAL_HEADERS)] if OFFICIAL_HEADERS.is_dir() else []
LINK = ["-lpthread", "-ldl"]


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else g++; None when there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compile_backend(out_dir: Path, sanitize: str = "") -> Path:
    """Write LIBRARY into out_dir unless it is there, made from the same sources.

    sanitize: "thread", "address" or another of the compiler's; the host program must be built with it too.
    Returns its path.  Raises RuntimeError with the compiler's output when compiling fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++, or set CXX")
    library, stamp = out_dir / LIBRARY, out_dir / f".{LIBRARY}.hash"
    flags = [*FLAGS, *([f"-fsanitize={sanitize}", "-O1", "-g"] if sanitize else [])]
    wanted = _fingerprint(compiler, flags)
    if library.exists() and stamp.exists() and stamp.read_text() == wanted:
        return library
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir) as scratch:
        objects = _compile_all(compiler, flags, Path(scratch))
        made = Path(scratch) / LIBRARY
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(made), *LINK])
        made.replace(library)  # a running server keeps the old file mapped
    stamp.write_text(wanted)
    return library


def _compile_all(compiler: str, flags: list[str], scratch: Path) -> list[Path]:
    """One object file per source, two compilers at a time."""
    sources = sorted(SOURCES.glob("*.cc"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    commands = [[compiler, *flags, "-c", str(src), "-o", str(obj)] for src, obj in zip(sources, objects)]
    running: list[subprocess.Popen[str]] = []
    outputs = []
    for command in commands:
        if len(running) == max(2, (os.cpu_count() or 2) // 2):
            outputs.append(_finish(running.pop(0)))
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs += [_finish(process) for process in running]
    errors = [text for code, text in outputs if code != 0]
    if errors:
        raise RuntimeError("compiling the backend failed:\n" + "\n".join(errors))
    return objects


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate()
    return process.returncode, output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _fingerprint(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join([compiler, *flags, *LINK]).encode())
    for source in sorted(SOURCES.glob("*.cc")) + sorted(SOURCES.glob("*.h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the library")
    parser.add_argument("--sanitize", default="", help="thread, for example: for tests/fuzz/run_fuzzers.py")
    arguments = parser.parse_args()
    try:
        print(compile_backend(arguments.out, arguments.sanitize))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
