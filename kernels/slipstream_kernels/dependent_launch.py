"""Programmatic dependent launch: a kernel is set up, and loads its weights, while the kernel before it still runs.

The rules that all kernels of a step keep, in Triton-lang (triton/dependent_launch.py) and in CUDA C++ alike:
1. Start the dependents at once, as the first instruction: it costs nothing and lets the next kernel come up early.
2. Await the kernel before, in every program, before anything that a kernel wrote is read and before any write.
   Its wait ends when the kernel before has ended with all its writes.  A kernel that ended without waiting would let
   the next one overtake the one before: the order holds only because every kernel of the chain waits.
3. Before the wait only read what no kernel of the step writes: weights, and the step's block tables and lengths, which
   arrive by copies (a copy awaits everything before it, and is awaited).
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def launches_dependently(device: torch.device) -> bool:
    """Whether kernels on `device` are launched so: from Hopper (compute capability 9.0) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
