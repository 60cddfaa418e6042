"""After a verification: the keys and values of accepted drafts, moved to the slots of their positions. Engine thread.

A chain's drafts lie where they belong already; only a tree's branches have gaps between them. Blocks that are left
over need nothing: the request goes on in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slipstream_kernels import ops

from slipstream.core.request import Request
from slipstream.core.step import ScheduledRequest
from slipstream.nn.attention import LayerCache
from slipstream.runtime.host_copy import to_device


class Compaction:
    """caches: of all layers, of one block size."""

    def __init__(self, caches: Sequence[LayerCache], block_size: int, device: torch.device) -> None:
        self._table = ops.slot_table(caches)
        self._block_size = block_size
        self._device = device

    def warm_up(self) -> None:
        """Compile what `keep` runs; a slot is put where it lies."""
        zero = to_device([0], torch.int64, self._device)
        ops.move_slots(self._table, zero, zero, to_device([0, 1], torch.int32, self._device))

    def keep(self, verified: Sequence[tuple[ScheduledRequest, list[int]]]) -> None:
        """verified: requests of a step, and which of each one's rows hold, the first always among them."""
        sources: list[int] = []
        targets: list[int] = []
        starts = [0]
        for scheduled, rows in verified:
            for place, row in enumerate(rows):
                if row != place:
                    first = scheduled.num_computed_tokens
                    sources.append(self._slot(scheduled.request, first + row))
                    targets.append(self._slot(scheduled.request, first + place))
            if len(sources) > starts[-1]:
                starts.append(len(sources))
        if sources:
            slots = to_device(sources + targets, torch.int64, self._device).view(2, -1)
            ops.move_slots(self._table, slots[0], slots[1], to_device(starts, torch.int32, self._device))

    def _slot(self, request: Request, place: int) -> int:
        return request.block_ids[place // self._block_size] * self._block_size + place % self._block_size
