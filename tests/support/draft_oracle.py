"""A proposer that knows the output and drafts it, with wrong tokens in between and as other branches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from engine_driver import model_worker
from slipstream.core.request import Request
from slipstream.engine.engine import Engine
from slipstream.worker.spec_decode.interface import DraftOutput, DraftRequest

WRONG = 5  # a token that is rare in the tests' texts


class Oracle:
    """texts: handle, sequence index -> output. is_tree: branches of wrong tokens before each right one."""

    drafts_trees = True
    num_scratch_slots = 3
    num_drafts = 6

    def __init__(self, texts: dict[tuple[int, int], list[int]], is_tree: bool, seed: int = 0) -> None:
        self.texts, self.is_tree = texts, is_tree
        self.dice = random.Random(seed)
        self.num_calls = 0
        self.requests: set[Request] = set()
        self.submitted: dict[int, Request] = {}  # by request id

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftOutput]:
        self.num_calls += bool(requests)
        self.requests |= {self.submitted[one.request.sequence_id] for one in requests}
        return [self._drafts(one) for one in requests]

    @property
    def num_accepted(self) -> int:
        return sum(request.num_accepted_tokens for request in self.requests)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        pass

    def _drafts(self, wanted: DraftRequest) -> DraftOutput:
        request = self.submitted[wanted.request.sequence_id]
        assert wanted.request.token_ids == request.token_ids, "the worker knows the text"
        text = self.texts[request.handle, request.sequence_index]
        right = text[request.num_output_tokens :][: self.dice.randint(0, 4)]
        if self.dice.random() < 0.3:
            right.append(WRONG)
        token_ids: list[int] = []
        parents: list[int] = []
        parent = -1
        for token_id in right:
            if self.is_tree and self.dice.random() < 0.6:
                token_ids += [WRONG, WRONG + 1]
                parents += [parent, len(token_ids) - 2]
            parents.append(parent)
            parent = len(token_ids)
            token_ids.append(token_id)
        token_ids, parents = token_ids[: wanted.budget.num_drafts], parents[: wanted.budget.num_drafts]
        return DraftOutput(token_ids, parents if self.is_tree else [])


def consult(engine: Engine, oracle: Oracle) -> None:
    """Replace the n-gram proposer of an engine by the oracle."""
    speculator = model_worker(engine).speculator
    speculator._proposers["ngram"] = speculator._drafters["ngram"] = oracle  # type: ignore[assignment]
    info = replace(
        engine._drafting._drafters["ngram"], num_drafts=oracle.num_drafts, num_scratch_slots=3, makes_chains=False
    )
    engine._drafting._drafters["ngram"] = info
    submit = engine.submit

    def note(request: Request) -> list[Request]:
        sequences = submit(request)
        oracle.submitted.update({one.sequence_id: one for one in sequences})
        return sequences

    engine.submit = note  # type: ignore[method-assign]
