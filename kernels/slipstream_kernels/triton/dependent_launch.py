"""Programmatic dependent launch (PDL) in Triton-lang.  The rules: slipstream_kernels/dependent_launch.py.

A kernel takes `DEPENDENT: tl.constexpr`, begins with start_dependents(DEPENDENT), calls await_previous(DEPENDENT)
before its first access to data that kernels write, and is launched with **dependent_launch(x.device).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.triton.interpreter import IS_INTERPRETING


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The kernel's DEPENDENT and the matching launch option.  The interpreter supports neither."""
    if IS_INTERPRETING or not launches_dependently(device):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def start_dependents(DEPENDENT: tl.constexpr):
    """Launch the next kernel once all programs of this one have called this or ended."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(DEPENDENT: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
