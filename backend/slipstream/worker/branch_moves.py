"""Moves accepted branches of draft trees in the KV cache of a stage, when the engine says which they are.

Engine thread. In one process the verifier does so at once. With stages other steps have been launched before one is
read, perhaps with blocks that a preempted request had in it. So the engine says with a later step what is left to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.host_copy import to_device
from slipstream.worker.interface import AcceptedBranches, StepInput
from slipstream.worker.kv_cache import Compaction


@dataclass(frozen=True)
class _TreeStep:
    """first_rows: the row of each request's last token. slots: of all rows, [T] int64, by KV group."""

    first_rows: list[int]
    slots: list[Tensor]


class BranchMoves:
    """compactions: of each KV group of the stage's layers. has_trees: some drafts may be trees."""

    def __init__(self, compactions: Sequence[Compaction], has_trees: bool, device: torch.device) -> None:
        self._compactions, self._device = compactions, device
        self._steps: dict[int, _TreeStep] = {}  # by step id, until they are told
        for compaction in compactions if has_trees else ():
            compaction.warm_up()

    def note(self, step: StepInput, batch: ForwardBatch) -> None:
        """Remember where a step puts the keys of its drafts, if some are trees."""
        if not step.draft_parents:
            return
        first_rows, end = [], 0
        for num_rows, num_drafts in zip(step.num_scheduled_tokens, step.num_drafts):
            end += num_rows
            first_rows.append(end - 1 - num_drafts)
        slots = [batch.slot_mapping, *(group.slot_mapping for group in batch.other_groups)]
        self._steps[step.step_id] = _TreeStep(first_rows, slots)

    def move(self, accepted: AcceptedBranches) -> None:
        """Move keys and values of accepted drafts to the slots of their positions."""
        noted = self._steps.pop(accepted.step_id, None)  # none: it was before a sleep
        if noted is None or not accepted.rows:
            return
        most = max(map(len, accepted.rows.values()))
        sources, targets, counts = [], [], []
        for index, rows in accepted.rows.items():
            first, rest = noted.first_rows[index], [0] * (most - len(rows))
            sources.append([*(first + row for row in rows), *rest])
            targets.append([*range(first, first + len(rows)), *rest])
            counts.append(len(rows))
        from_rows, to_rows = (to_device(rows, torch.int64, self._device) for rows in (sources, targets))
        num_moves = to_device(counts, torch.int32, self._device)
        for compaction, slots in zip(self._compactions, noted.slots, strict=True):
            compaction.move(slots[from_rows], slots[to_rows], num_moves)
