"""Requests of every kind for models in stages, and what is in the stages at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_driver import GREEDY, Told
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.ranks import LeadingWorker
from slipstream.worker.interface import StepInput, StepResult

SEEDED = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True, top_k=50, top_p=0.95)
EDITED = replace(SEEDED, repetition_penalty=1.2, min_tokens=5, bad_words_ids=((4, 5), (9,)), logit_bias=((7, 2.0),))
LOGPROBS = replace(GREEDY, logprobs=3, prompt_logprobs=2)
GUIDED = SamplingParams(max_tokens=16, temperature=0.0, guide=Guide("regex", "[a-z]{12}"))
KINDS = (GREEDY, SEEDED, EDITED, LOGPROBS, GUIDED)
NARROW = {"max_num_batched_tokens": 40}


class Recorder:
    """A worker that notes which steps are in the stages, between `execute` and `result`."""

    def __init__(self, worker: LeadingWorker) -> None:
        self._worker = worker
        self.underway: dict[int, Sequence[int]] = {}  # step id -> sequence ids of rows that sample
        self.most_underway = self.num_resumed = self.num_drafts = self.num_moved = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute(self, step: StepInput) -> None:
        sampling = [own for own, samples in zip(step.sequence_ids, step.samples) if samples]
        earlier = {own for ids in self.underway.values() for own in ids}
        assert not step.pending and earlier.isdisjoint(sampling), "one token of a request at a time"
        self.num_drafts += step.total_num_drafts
        self.num_moved += sum(len(accepted.rows) for accepted in step.accepted)
        self.num_resumed += sum(new.num_preemptions > 0 for new in step.new_requests)
        self.underway[step.step_id] = sampling
        self.most_underway = max(self.most_underway, len(self.underway))
        self._worker.execute(step)

    def result(self, step_id: int) -> StepResult:
        del self.underway[step_id]
        return self._worker.result(step_id)


def record(engine: Engine) -> Recorder:
    assert isinstance(engine.worker, LeadingWorker)
    engine.worker = recorder = Recorder(engine.worker)  # type: ignore[assignment]
    return recorder


def same(found: Sequence[Told], expected: Sequence[Told]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.error, one.token_ids) == (other.error, other.token_ids)
        for own, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            pairs = [(a, b) for a, b in zip(own or [], theirs or [], strict=True) if a and b]
            assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)
