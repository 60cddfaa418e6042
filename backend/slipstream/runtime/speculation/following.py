"""What proposers share whose head follows the model over every token: EAGLE's and MTP's. Engine thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.runtime.host_copy import HostCopy
from slipstream.runtime.speculation.draft_graphs import DraftGraphs
from slipstream.runtime.speculation.follower import Follower
from slipstream.runtime.speculation.proposer import Drafts, StepResult, Wish


class FollowingProposer(ABC):
    """A subclass sets _follower, and _graphs, which returns a row of guesses per request."""

    _follower: Follower
    _graphs: DraftGraphs

    @abstractmethod
    def _drafts(self, wish: Wish, guesses: list[Any]) -> Drafts:
        """What a request's row of guesses gives it."""

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    @torch.inference_mode()
    def propose(self, result: StepResult, wishes: Sequence[Wish]) -> list[Drafts]:
        followed = self._follower.follow(result)
        if followed is None:
            return [Drafts() for _ in wishes]
        guesses = self._graphs.run(followed.arrays, result.hidden)
        if not wishes:
            return []
        (rows,) = HostCopy((guesses,)).lists()
        return [
            self._drafts(wish, rows[followed.order[wish.computed]]) if wish.computed in followed.order else Drafts()
            for wish in wishes
        ]

    def forget(self, requests: Sequence[Request]) -> None:
        self._follower.forget(requests)
