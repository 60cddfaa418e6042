"""How much of a GPU's memory a load leaves in holes between weights.

To be called in a process of its own: the allocator fills holes that earlier tests have left.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from slipstream.worker.residency import ALLOCATOR_VARIABLES, pages_without_holes

MIB = 1 << 20


def holes_of_a_load(is_guarded: bool, user_settings: str = "") -> int:
    """Bytes. is_guarded: by pages_without_holes. user_settings: of the allocator, in the environment."""
    if user_settings:
        os.environ[ALLOCATOR_VARIABLES[0]] = user_settings
    with pages_without_holes(torch.device("cuda")) if is_guarded else nullcontext():
        kept = _repack_as_a_load_does()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    del kept
    return left


def _repack_as_a_load_does() -> list[torch.Tensor]:
    """Large tensors are replaced one after the other by some that are a little larger, with small ones between."""
    stored = [torch.empty(96 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    kept = []
    for index in range(16):
        kept.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))
        stored[index] = torch.empty(0)
        kept.append(torch.empty(60 * MIB, dtype=torch.uint8, device="cuda"))
    return kept
