"""A proposer that knows the output and drafts it, with wrong tokens in between and as other branches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from slipstream.core.request import Request
from slipstream.engine.engine import Engine
from slipstream.worker.spec_decode.interface import Drafts, Wish

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

    def propose(self, wishes: Sequence[Wish]) -> list[Drafts]:
        self.num_calls += bool(wishes)
        self.requests |= {wish.request for wish in wishes}
        return [self._drafts(wish) for wish in wishes]

    @property
    def num_accepted(self) -> int:
        return sum(request.num_accepted_tokens for request in self.requests)

    def forget(self, requests: Sequence[Request]) -> None:
        pass

    def _drafts(self, wish: Wish) -> Drafts:
        request = wish.request
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
        token_ids, parents = token_ids[: wish.num_drafts], parents[: wish.num_drafts]
        return Drafts(token_ids, parents if self.is_tree else [])


def consult(engine: Engine, oracle: Oracle) -> None:
    """Replace the n-gram proposer of an engine by the oracle."""
    engine._speculator._proposers["ngram"] = engine._speculator._drafters["ngram"] = oracle
