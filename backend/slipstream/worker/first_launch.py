"""What the first launch of a kernel in Triton-lang waits for, done before by another thread.

Triton-lang finds a compiled kernel by a hash of its whole compiler, a library of 0.5 GB: 0.3 s of every start where the
file is in the page cache and the CPU has SHA instructions, 0.9 s at the first read. Hashing releases the GIL.
"""

from __future__ import annotations

import torch

from slipstream.core.start_up import StartUp


def begin_first_launch(device: torch.device, phases: StartUp) -> None:
    """On a GPU, begin it now, beside the phases of the start; `phases.join` waits for it."""
    if device.type == "cuda":
        phases.beside(_hash_compiler)


def _hash_compiler() -> None:
    from triton.runtime.cache import triton_key  # only here: an engine on a CPU never imports triton

    triton_key()  # it keeps the result
