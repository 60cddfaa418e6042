"""After a verification: what is cached of accepted drafts, moved to the slots of their positions. Engine thread.

A chain's drafts lie where they belong already; only a tree's branches have gaps between them. Blocks that are left
over need nothing: the request goes on in them.
"""

from __future__ import annotations

import torch
from slipstream_kernels import ops

from slipstream.worker.kv_cache import PlanePool


class Compaction:
    """pool: of the layers whose planes are moved."""

    def __init__(self, pool: PlanePool, device: torch.device) -> None:
        self._table = ops.slot_table([tensor for planes in pool.planes for tensor in planes.values()])
        self._device = device

    def warm_up(self) -> None:
        """Compile what `keep` runs; nothing is moved."""
        self.keep(ops.empty_accepted_rows(1, self._device))

    def keep(self, kept: ops.AcceptedRows) -> None:
        """Of requests whose slots were written row by row."""
        ops.compact_kv(self._table, kept.sources, kept.targets, kept.counts)
