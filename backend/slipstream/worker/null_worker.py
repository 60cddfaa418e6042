"""A worker without a model: every sampled token is the same, or the first that a grammar allows. Used to measure the
cost of everything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.core.errors import EngineError
from slipstream.worker.interface import AheadInput, DraftInput, DraftResult, StepInput, StepResult, WorkerInfo
from slipstream.worker.sample.structured_output import GrammarMasks


class NullWorker:
    """No weights and no computation. Serves no log-probabilities."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._sampled: dict[int, list[int]] = {}  # by step, in order

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo()

    def execute(self, step: StepInput) -> None:
        self._sampled[step.step_id] = [self._token_id] * sum(step.samples)

    def sample(self, masks: GrammarMasks) -> None:
        last = self._sampled[max(self._sampled)]
        for row, bits in zip(masks.rows, masks.bits):
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            last[row] = int(allowed[0]) if len(allowed) else self._token_id

    def execute_ahead(self, ahead: AheadInput) -> None:
        raise EngineError("a worker without a model verifies nothing")

    def result(self, step_id: int) -> StepResult:
        return StepResult(self._sampled.pop(step_id))

    def draft(self, drafts: DraftInput) -> DraftResult:
        raise EngineError("a worker without a model drafts nothing")

    def forget(self, sequence_ids: Sequence[int]) -> None:
        pass

    def prepare(self) -> bool:
        return False

    def sleep(self, level: int) -> None:
        pass

    def wake(self, model: str | None) -> None:
        pass

    def close(self) -> None:
        pass
