"""Libraries of a streaming product, one for each tile: built side by side, and how many CTAs of one run at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

from slipstream_kernels.cuda.build import load


def load_all(source: str, variants: Sequence[tuple[str, ...]]) -> None:
    """variants: the macros of each.  Raises KernelBuildError if one cannot be built or loaded."""
    with ThreadPoolExecutor(len(variants)) as pool:
        for _ in pool.map(lambda defines: load(source, defines), variants):
            pass


@lru_cache(maxsize=256)
def count_ctas_of(device: torch.device, source: str, defines: tuple[str, ...]) -> int:
    """How many CTAs of the library run at once on the device; 0: none."""
    with torch.cuda.device(device):
        return int(load(source, defines).slipstream_count_ctas())
