"""Compile every Triton-lang kernel to a cubin, without a GPU.  Run as a script, TRITON_INTERPRET unset.

    python tests/support/compile_kernels.py [compute capability, such as 86; 90 unless given]

The interpreter accepts more than the compiler does; this finds such kernels without a GPU. What needs FP8 is left out
below 8.9, early launches below 9.0.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import slipstream_kernels
import triton
from kernel_signatures import KERNELS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# of Triton-lang kernels, by stem
MODULES = {
    path.stem: f"slipstream_kernels.{path.parts[-3]}.triton.{path.stem}"
    for path in Path(slipstream_kernels.__path__[0]).glob("*/triton/*.py")
}


NEEDS_FP8 = "type fp8e4nv not supported in this architecture"
# bytes of shared memory that a program may have, of GPUs in CUDA's programming guide
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def compile_kernel(index: int, target: int = 90) -> tuple[str, int, int]:
    """Compile one of KERNELS; its name, the size of its cubin (0: the target has no FP8) and its shared memory."""
    warnings.simplefilter("ignore")
    module, name, types, constants, num_warps = KERNELS[index]
    kernel = getattr(importlib.import_module(MODULES[module]), name)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    constants = {"DEPENDENT": target >= 90, **constants}
    constexprs = {argument: constants[argument] for argument in kernel.arg_names if argument not in types}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    waits_for_others = bool(constexprs.get("DEPENDENT"))
    options = {"num_warps": num_warps, "launch_pdl": waits_for_others}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:
        if target < 89 and NEEDS_FP8 in str(error):
            return name, 0, 0
        raise
    waits = compiled.asm["ptx"].count("griddepcontrol.wait")
    assert waits == waits_for_others, f"{name}: waits {waits} times for the kernel before"
    return name, len(compiled.asm["cubin"]), compiled.metadata.shared


def main() -> None:
    """Compile all, on several cores, printing one line per kernel: its name, the size of its cubin, shared memory."""
    target = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for line in pool.map(compile_kernel, range(len(KERNELS)), repeat(target)):
            print(*line)


if __name__ == "__main__":
    main()
