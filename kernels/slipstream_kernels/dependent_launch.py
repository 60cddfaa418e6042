"""Programmatic dependent launch (PDL): a kernel is launched, and loads its weights, while the previous one still runs.

All kernels of a step, in Triton-lang (triton/dependent_launch.py) and CUDA C++, keep these rules:
1. The first instruction starts the dependents: it is free and lets the next kernel launch early.
2. Every program waits for the previous kernel before it reads anything that a kernel wrote and before any write.
   The wait ends when the previous kernel has ended and its writes are visible.  Every kernel must wait: a kernel that
   ended without waiting would let its successor overtake its predecessor.
3. Before the wait, read only data that no kernel of the step writes: weights, and the step's block tables and lengths,
   which are copied (copies wait for all earlier work and are waited for).  Large weights come at `copy_pace`, so that
   what the previous kernel reads does not wait behind them.
4. In a CUDA graph its first kernel, ops.unpack_step_inputs, writes the block tables.  It starts no dependents, and the
   next kernel is launched in the ordinary way (torch's embedding, or a copy of rows): all later ones begin when the
   tables are complete and visible.
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def launches_dependently(device: torch.device) -> bool:
    """Whether kernels on `device` use PDL: from Hopper (compute capability 9.0) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def copy_pace(device: torch.device) -> int:
    """Bytes a clock of an SM's early copies of weights: 0.85 of its share of the rate that memory is made for.

    16 on an H200, where 16 and 20 were as good and 6, 9 and 12 slower (docs/measurements/gemm.md).  0, as fast as it
    can, where the driver does not state its clocks.
    """
    properties = torch.cuda.get_device_properties(device)
    bytes_per_s = 2 * 1e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    clocks_per_s = 1e3 * properties.clock_rate * properties.multi_processor_count
    return round(0.85 * bytes_per_s / clocks_per_s) if clocks_per_s else 0
