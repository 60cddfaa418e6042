"""Tiles of a step's rows as the worker gathers them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from slipstream.worker.adapters import gather_rows
from slipstream_kernels import ops


def tiles_of(slots: Sequence[int], num_slots: int, device: torch.device) -> ops.AdapterTiles:
    """slots: of each row."""
    of_tiles, rows = gather_rows(np.array(slots), len(slots), num_slots)
    return ops.AdapterTiles(torch.from_numpy(of_tiles).to(device), torch.from_numpy(rows).to(device))
