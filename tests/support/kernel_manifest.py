"""Records registers and spilled bytes of every CUDA kernel as nvcc compiles it.  No GPU needed.

    python tests/support/kernel_manifest.py [--jobs N] [--keep DIR] [--only SOURCE,...]

rewrites tests/golden/cuda_kernels.json: per library the registers of its kernels, descending, their spilled bytes, and
the digest of sources and options that this came of, unless the compiler warned.  A test of a library compiles it only
if it has another digest, or always with SLIPSTREAM_LONG_TESTS=1.
Takes 20 minutes on one core, and 10 more with CUTLASS's headers (python -m slipstream_kernels.cuda.cutlass), without
which the lines of its kernels are kept.  --only compiles sources of these names, such as sm90_sample.cu, and keeps the
other lines.  --keep stores the cubins in DIR, and no host code is compiled, to compare machine code before and after a
change.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "kernels")]

from slipstream_kernels.cuda import build, cutlass  # noqa: E402
from slipstream_kernels.cuda.variants import Variant, on_cutlass, variants  # noqa: E402

MANIFEST = ROOT / "tests/golden/cuda_kernels.json"
REMAKE = "other registers than recorded; if that is meant: python tests/support/kernel_manifest.py"


@dataclass(frozen=True)
class Compiled:
    """registers: of each kernel, descending.  spilled_bytes: stored and loaded, of all.  warnings: wgmma serialised."""

    registers: tuple[int, ...]
    spilled_bytes: int
    warnings: tuple[str, ...]


class Recorded(NamedTuple):
    """registers, spilled_bytes: see Compiled.  digest: "" if the compiler warned or it is not known."""

    registers: list[int]
    spilled_bytes: int
    digest: str = ""


def name_of(variant: Variant) -> str:
    source, defines = variant
    return " ".join([source, *(define.removeprefix("SLIPSTREAM_") for define in defines)])


def compile_variant(variant: Variant, keep: Path | None = None, flags: Sequence[str] = ()) -> Compiled:
    """Compile the library, or to keep it the device code only.  Raises KernelBuildError with the compiler's message."""
    nvcc = build.find_nvcc()
    assert nvcc is not None, "nvcc is not installed"
    source, defines = variant
    options, libraries = list(build.FLAGS), build.library_flags(nvcc)
    if keep is not None:
        options = [option for option in options if option != "-shared" and not option.startswith("-Xcompiler")]
        options, libraries = [*options, "-cubin"], []
    with tempfile.TemporaryDirectory() as folder:
        out = keep / (re.sub(r"\W+", "_", name_of(variant)) + ".cubin") if keep else Path(folder) / "kernel.so"
        command = [str(nvcc), *options, *flags, *(f"-D{define}" for define in defines), "-Xptxas=-v"]
        command += [*(f"-I{path}" for path in build.include_folders()), *libraries]
        command += ["-o", str(out), str(build.SOURCE_FOLDER / source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=build.MAX_HEAVY_COMPILE_S)
    if done.returncode:
        raise build.KernelBuildError(f"{name_of(variant)}\n{done.stdout}{done.stderr}")
    return read_report(done.stdout + done.stderr)


def read_report(text: str) -> Compiled:
    """Parse the output of ptxas -v."""
    registers = sorted((int(count) for count in re.findall(r"Used (\d+) registers", text)), reverse=True)
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", text))
    warnings = tuple(line for line in text.splitlines() if re.search(r"\(C75\d\d\)|serialized", line))
    return Compiled(tuple(registers), spilled, warnings)


@lru_cache
def compiler_version() -> str | None:
    """Such as 13.0.88; None without nvcc."""
    nvcc = build.find_nvcc()
    if nvcc is None:
        return None
    said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    assert found, said
    return found.group(1)


@lru_cache
def load() -> tuple[str, dict[str, Recorded]]:
    """(version of nvcc, {library: record})."""
    stored = json.loads(MANIFEST.read_text())
    return stored["nvcc"], {name: Recorded(*entry) for name, entry in stored["libraries"].items()}


def recorded(variant: Variant) -> Recorded | None:
    """The record of a library if this nvcc is the recorded version, else None."""
    version, libraries = load()
    return libraries[name_of(variant)] if version == compiler_version() else None


def compiled_before(variant: Variant) -> Recorded | None:
    """The record if this nvcc compiled the same sources with the same options without a warning, else None."""
    found = recorded(variant)
    is_same = found is not None and found.digest == digest_of(variant)
    return found if is_same and os.environ.get("SLIPSTREAM_LONG_TESTS") != "1" else None


def digest_of(variant: Variant, flags: Sequence[str] = ()) -> str:
    source, defines = variant
    return build._digest(source, build._options(defines, flags))


def write(version: str, libraries: dict[str, Recorded]) -> None:
    entries = {name: list(entry) if entry.digest else list(entry[:2]) for name, entry in libraries.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
    MANIFEST.write_text(f'{{"nvcc": "{version}", "libraries": {{\n{lines}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","))
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    libraries: dict[str, Recorded] = load()[1] if MANIFEST.exists() else {}
    wanted = [(variant, ()) for variant in variants()]
    if cutlass.missing() is None:
        flags = (*cutlass.FLAGS, f"-I{cutlass.include_folder()}")
        wanted = [*((variant, flags) for variant in on_cutlass()), *wanted]  # type: ignore[misc]
    if arguments.only is not None:
        wanted = [(variant, flags) for variant, flags in wanted if variant[0] in arguments.only]
    names = {name_of(variant) for variant in (*variants(), *on_cutlass())}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        compiled = pool.map(lambda job: partial(compile_variant, keep=arguments.keep)(job[0], flags=job[1]), wanted)
        for (variant, flags), found in zip(wanted, compiled):
            print(name_of(variant), found, flush=True)
            digest = "" if found.warnings else digest_of(variant, flags)
            libraries[name_of(variant)] = Recorded(list(found.registers), found.spilled_bytes, digest)
    version = compiler_version()
    assert version is not None
    write(version, {name: entry for name, entry in libraries.items() if name in names})


if __name__ == "__main__":
    main()
