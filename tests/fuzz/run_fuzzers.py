"""Fuzz what reads bytes of others: the C++ side under libFuzzer with ASan and UBSan, the Python side by mutation.

    python tests/fuzz/run_fuzzers.py --seconds 600    # all targets, 600 s in all; exits with 1 when one finds a defect
    python tests/fuzz/run_fuzzers.py --target frames --keep   # keeps inputs that reach new code in tests/fuzz/corpus

Needs clang (`apt-get install clang libclang-rt-dev`, or clang-14 libclang-rt-14-dev). A defect's input is left in the
folder that is printed; `<program> <input>` runs it again.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
CORPUS = FOLDER / "corpus"
BACKEND = ROOT / "backend/triton"
SOURCES = {  # of backend/triton, by target
    "request": ("json_splice", "request", "router", "routing", "trace", "wire"),
    "frames": ("wire", "live_requests", "metrics", "open_request", "pacing"),
    "json": ("json_splice",),
}
TARGETS = (*SOURCES, "python")
SANITIZERS = ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
MAX_INPUT_BYTES = 2048
_STATUS = re.compile(r"^#\d+\s+\S+\s+cov: (\d+) ft: (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Figures:
    """executions: inputs run. coverage: edges of code reached, 0 where it is not measured. defect: "" when none."""

    target: str
    executions: int
    coverage: int
    seconds: float
    defect: str = ""


def find_clang() -> str | None:
    """A clang++ that has libFuzzer's library."""
    names = ["clang++", *(f"clang++-{version}" for version in range(22, 12, -1))]
    for found in filter(None, map(shutil.which, names)):
        asked = [found, "-print-file-name=libclang_rt.fuzzer-x86_64.a"]
        if Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).is_absolute():
            return found
        resources = subprocess.run([found, "-print-resource-dir"], capture_output=True, text=True, check=True)
        if list(Path(resources.stdout.strip()).glob("lib/*/libclang_rt.fuzzer*")):
            return found
    return None


def compile_target(clang: str, target: str, folder: Path) -> Path:
    """The fuzzer of a target. Raises RuntimeError with the compiler's output."""
    program = folder / f"fuzz_{target}"
    sources = [FOLDER / f"fuzz_{target}.cc", *(BACKEND / f"{name}.cc" for name in SOURCES[target])]
    if target != "json":
        sources.append(FOLDER / "fake_api.cc")
    command = [clang, "-std=c++17", "-g", "-O1", *SANITIZERS, f"-I{BACKEND}", f"-I{FOLDER}", *map(str, sources)]
    done = subprocess.run([*command, "-o", str(program), "-ldl", "-lpthread"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{target} does not compile:\n{done.stderr}")
    return program


def run_target(program: Path, target: str, seconds: float, folder: Path, seed: int = 0) -> Figures:
    """Fuzz for so long, from the corpus of the tree; new inputs and a defect's stay in the folder."""
    inputs = folder / f"inputs_{target}"
    inputs.mkdir(exist_ok=True)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-max_len={MAX_INPUT_BYTES}", f"-seed={seed}"]
    options += ["-timeout=20", "-rss_limit_mb=3000", "-print_final_stats=1", f"-artifact_prefix={folder}/{target}-"]
    started = time.monotonic()
    command = [str(program), *options, str(inputs), str(CORPUS / target)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + 300)
    executed = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    reached = _STATUS.findall(done.stderr)
    defect = "" if done.returncode == 0 else f"in {folder}: {done.stderr[-4000:]}"
    return Figures(
        target,
        int(executed[1]) if executed else 0,
        int(reached[-1][0]) if reached else 0,
        time.monotonic() - started,
        defect,
    )


def keep_inputs(program: Path, target: str, folder: Path) -> None:
    """Rewrite the tree's corpus as the fewest inputs that reach all that old and new inputs reach."""
    merged = folder / f"merged_{target}"
    merged.mkdir()
    old_and_new = [str(CORPUS / target), str(folder / f"inputs_{target}")]
    subprocess.run([str(program), "-set_cover_merge=1", str(merged), *old_and_new], capture_output=True, check=True)
    shutil.rmtree(CORPUS / target)
    shutil.copytree(merged, CORPUS / target)


def run_python(seconds: float, seed: int = 0) -> Figures:
    sys.path[:0] = [str(FOLDER), str(ROOT / "tests/support")]
    from python_requests import fuzz

    started = time.monotonic()
    try:
        counts = fuzz(seconds, seed)
    except AssertionError as error:
        return Figures("python", 0, 0, time.monotonic() - started, str(error))
    return Figures("python", counts.cases, 0, time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="rewrite the corpus of the tree")
    arguments = parser.parse_args()
    targets, clang = arguments.target or TARGETS, find_clang()
    if clang is None and set(targets) != {"python"}:
        print("no clang with libFuzzer: apt-get install clang libclang-rt-dev", file=sys.stderr)
        return 2
    folder, has_defect = Path(tempfile.mkdtemp(prefix="slipstream-fuzz-")), False
    for target in targets:
        seconds = arguments.seconds / len(targets)
        if target == "python":
            found = run_python(seconds, arguments.seed)
        else:
            program = compile_target(str(clang), target, folder)
            found = run_target(program, target, seconds, folder, arguments.seed)
            if arguments.keep and not found.defect:
                keep_inputs(program, target, folder)
        print(f"{target}: {found.executions} executions, {found.coverage} edges, {found.seconds:.0f} s", flush=True)
        if found.defect:
            has_defect = True
            print(found.defect, file=sys.stderr)
    if not has_defect:
        shutil.rmtree(folder)
    return int(has_defect)


if __name__ == "__main__":
    raise SystemExit(main())
