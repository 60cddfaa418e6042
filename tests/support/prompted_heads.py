"""Random heads whose guesses are right most of the time, because somebody who knows the text to come prompts them.

All else is the head's own: its cache, its tree, its graphs. So acceptance, rejection and moved branches happen with
heads that were never trained.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from engine_driver import model_worker
from slipstream.core.step import ScheduledStep
from slipstream.engine.engine import Engine
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.spec_decode.medusa import MedusaDrafter
from slipstream.worker.spec_decode.mtp import MTPHead


class Prompter:
    """texts: prompt and output by handle. rate: how often a guess is put right, if those before it were."""

    def __init__(self, texts: dict[int, list[int]], rate: float = 0.85) -> None:
        self._texts, self._rate, self._dice = texts, rate, random.Random(0)
        self._step = ScheduledStep()
        self._step_of = lambda: self._step
        self.num_drafts = 0  # calls of a head

    def attend(self, engine: Engine) -> None:
        """Prompt every head of an engine from now on."""
        drafting: Any = engine._drafting
        methods_behind = drafting.methods_behind

        def note(step: ScheduledStep) -> Any:
            self._step = step
            return methods_behind(step)

        drafting.methods_behind = note
        if engine.scheduler.num_microbatches > 1:  # heads draft when a step is read, not when it is launched
            self._step_of = lambda: engine._in_flight[0].step
        for head in model_worker(engine).speculator._heads.values():
            self._prompt(head)

    def _prompt(self, head: Any) -> None:
        draft = head.draft

        def drafted(rows: ComputedRows) -> torch.Tensor:
            guesses: torch.Tensor = draft(rows).clone()
            self.num_drafts += 1
            for place, row in enumerate(self._step_of().rows):
                if row.request.handle not in self._texts:
                    continue
                text = self._texts[row.request.handle]
                for number, column in enumerate(_first_branch(head, guesses[place])):
                    end = self._num_held(rows, place) + 1 + number  # the token before it is the one just drawn
                    if end >= len(text) or self._dice.random() > self._rate:
                        break
                    (guesses[place] if guesses.dim() == 2 else guesses[place, 1])[column] = text[end]
            return guesses

        head.draft = drafted

    def _num_held(self, rows: ComputedRows, place: int) -> int:
        """Tokens of a request that are computed and hold."""
        if len(rows.hidden) == len(rows.batch.positions):
            return int(rows.batch.positions[rows.last[place]]) + 1
        row = self._step_of().rows[place]
        return row.num_computed_tokens + row.num_scheduled_tokens


def _first_branch(head: Any, guesses: torch.Tensor) -> list[int]:
    """Places of a request's guesses that follow each other, from the first level on."""
    if isinstance(head, MTPHead):
        return list(range(len(guesses)))
    if isinstance(head, MedusaDrafter):
        places = {path: place for place, path in enumerate(head._choices)}
        return [places[path] for depth in range(1, 9) if (path := (0,) * depth) in places]
    nodes, _, parents, _, _ = guesses.tolist()
    branch: list[int] = []
    parent = -1
    while parent in parents:
        branch.append(parents.index(parent))
        parent = nodes[branch[-1]]
    return branch
