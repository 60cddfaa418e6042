"""Compile every Triton-lang kernel to a cubin for sm_90, without a GPU.  Run as a script, TRITON_INTERPRET unset.

The interpreter accepts more than the compiler does; this finds such kernels without a GPU.
"""

from __future__ import annotations

import importlib
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
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


def compile_kernel(index: int) -> tuple[str, int]:
    """Compile one of KERNELS; its name and the size of its cubin."""
    warnings.simplefilter("ignore")
    module, name, types, constants, num_warps = KERNELS[index]
    kernel = getattr(importlib.import_module(MODULES[module]), name)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    constants = {"DEPENDENT": True, **constants}
    constexprs = {argument: constants[argument] for argument in kernel.arg_names if argument not in types}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    options = {"num_warps": num_warps, "launch_pdl": "DEPENDENT" in constexprs}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    waits = compiled.asm["ptx"].count("griddepcontrol.wait")
    assert waits == ("DEPENDENT" in constexprs), f"{name}: waits {waits} times for the kernel before"
    return name, len(compiled.asm["cubin"])


def main() -> None:
    """Compile all, on several cores, printing one line per kernel: its name and the size of its cubin."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for name, size in pool.map(compile_kernel, range(len(KERNELS))):
            print(name, size)


if __name__ == "__main__":
    main()
