"""A worker without a model: every sampled token is the same. Used to measure the cost of everything else."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.errors import EngineError
from slipstream.worker.interface import AheadInput, DraftInput, DraftResult, StepInput, StepResult, WorkerInfo
from slipstream.worker.sample.structured_output import GrammarMasks


class NullWorker:
    """No weights and no computation. Serves neither log-probabilities nor grammars."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._num_sampled: dict[int, int] = {}  # by step, in order

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo()

    def execute(self, step: StepInput) -> None:
        self._num_sampled[step.step_id] = sum(step.samples)

    def sample(self, masks: GrammarMasks) -> None:
        pass

    def execute_ahead(self, ahead: AheadInput) -> None:
        raise EngineError("a worker without a model verifies nothing")

    def result(self, step_id: int) -> StepResult:
        return StepResult([self._token_id] * self._num_sampled.pop(step_id))

    def draft(self, drafts: DraftInput) -> DraftResult:
        raise EngineError("a worker without a model drafts nothing")

    def forget(self, sequence_ids: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass
