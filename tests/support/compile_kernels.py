"""Compile every Triton-lang kernel to a cubin, without a GPU.  Run as a script, TRITON_INTERPRET unset.

    python tests/support/compile_kernels.py [compute capability, such as 86; 90 unless given]
    python tests/support/compile_kernels.py --record

The interpreter accepts more than the compiler does; this finds such kernels without a GPU. What needs FP8 is left out
below 8.9, early launches below 9.0. What came of a compilation is kept in tests/golden/triton_kernels.json under a hash
of all that went into it, and such a kernel is not compiled again by the same version of Triton-lang; --record compiles
what is not in there, for every target, and writes it anew.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import slipstream_kernels
import triton
from expert_signatures import KERNELS as EXPERTS
from invariant_signatures import KERNELS as INVARIANT
from kernel_signatures import KERNELS as OTHERS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = [*OTHERS, *EXPERTS, *INVARIANT]
# of Triton-lang kernels, by stem
MODULES = {
    path.stem: f"slipstream_kernels.{path.parts[-3]}.triton.{path.stem}"
    for path in Path(slipstream_kernels.__path__[0]).glob("*/triton/*.py")
}

RECORD = Path(__file__).resolve().parents[1] / "golden" / "triton_kernels.json"
NEEDS_FP8 = "type fp8e4nv not supported in this architecture"
# bytes of shared memory that a program may have, of GPUs in CUDA's programming guide
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Compiled(NamedTuple):
    """size: of the cubin in bytes, 0 where the target has no FP8.  shared: bytes of shared memory."""

    name: str
    size: int
    shared: int


def read_record() -> dict[str, Compiled]:
    """What came of compilations by this version of Triton-lang, by `hash_of`; empty if the record is of another."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if record.get("triton") != triton.__version__:
        return {}
    return {key: Compiled(*compiled) for key, compiled in record["kernels"].items()}


def _source(index: int, target: int) -> tuple[ASTSource, dict[str, int | bool]]:
    """One of KERNELS with its signature and constants, and the compiler's options."""
    module, name, types, constants, num_warps = KERNELS[index]
    kernel = getattr(importlib.import_module(MODULES[module]), name)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    constants = {"DEPENDENT": target >= 90, **constants}
    constexprs = {argument: constants[argument] for argument in kernel.arg_names if argument not in types}
    options = {"num_warps": num_warps, "launch_pdl": bool(constexprs.get("DEPENDENT"))}
    return ASTSource(kernel, signature, constexprs=constexprs), options


def hash_of(index: int, target: int) -> str:
    """Hashes the text of the kernel and of all that it calls, its signature, constants, options and target."""
    source, options = _source(index, target)
    return hashlib.sha256(f"{source.hash()} {sorted(options.items())} {target}".encode()).hexdigest()[:20]


def compile_kernel(index: int, target: int = 90) -> Compiled:
    warnings.simplefilter("ignore")
    triton.knobs.compilation.disable_line_info = True  # else a cubin's size depends on its place in the file
    source, options = _source(index, target)
    name = KERNELS[index][1]
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:
        if target < 89 and NEEDS_FP8 in str(error):
            return Compiled(name, 0, 0)
        raise
    waits = compiled.asm["ptx"].count("griddepcontrol.wait")
    assert waits == options["launch_pdl"], f"{name}: waits {waits} times for the kernel before"
    return Compiled(name, len(compiled.asm["cubin"]), compiled.metadata.shared)


def compile_all(targets: list[int]) -> dict[str, Compiled]:
    """Every kernel for every target by `hash_of`, on several cores; from the record what is in it."""
    record = read_record()
    wanted = {hash_of(index, target): (index, target) for target in targets for index in range(len(KERNELS))}
    missing = {key: call for key, call in wanted.items() if key not in record}
    if missing:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            record |= dict(zip(missing, pool.map(compile_kernel, *zip(*missing.values(), strict=True)), strict=True))
    return {key: record[key] for key in wanted}


def main() -> None:
    """Print a line for each kernel: its name, the size of its cubin, shared memory."""
    if "--record" in sys.argv:
        kernels = dict(sorted(compile_all(list(SHARED_MEMORY)).items(), key=lambda item: (item[1], item[0])))
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(compiled)}" for key, compiled in kernels.items())
        RECORD.write_text(f'{{"triton": "{triton.__version__}", "kernels": {{\n{lines}\n}}}}\n')
        return
    target = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    for compiled in compile_all([target]).values():
        print(*compiled)


if __name__ == "__main__":
    main()
