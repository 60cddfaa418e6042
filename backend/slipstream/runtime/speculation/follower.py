"""What MTP modules and EAGLE heads share: their cache follows the model's, one token later. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.request import Request, RequestStatus
from slipstream.runtime.batch import StepArrays
from slipstream.runtime.speculation.draft_batch import DraftBatches, Span
from slipstream.runtime.speculation.proposer import ComputedTokens, StepResult, Surroundings
from slipstream.runtime.speculation.seen_tokens import SeenTokens


@dataclass(frozen=True)
class Followed:
    """arrays: what the head must compute to keep up; its logits_indices are the rows of the step's hidden states.

    order: place in StepResult.computed -> the request's place in the batch.
    """

    arrays: StepArrays
    order: dict[int, int]


class Follower:
    """method: requests of which are followed. num_more: slots after a request's tokens that drafting writes."""

    def __init__(self, method: str, surroundings: Surroundings, num_more: int) -> None:
        config, plan, device = surroundings.config, surroundings.plan, surroundings.hardware.device
        self._method = method
        seats = config.scheduler.max_num_seqs
        self.batches = DraftBatches(plan.block_size, plan.max_model_len, seats, device, num_more)
        self._seen = SeenTokens(plan.num_blocks, plan.block_size)

    def follow(self, result: StepResult) -> Followed | None:
        """Token i + 1 for each token i that the step computed; None: nothing to do."""
        spans: list[Span] = []
        rows: list[int] = []
        token_ids: list[int] = []
        order: dict[int, int] = {}
        for place, computed in enumerate(result.computed):
            if self._goes_on(computed, result.hidden is not None):
                count = len(computed.rows)
                order[place] = len(spans)
                spans.append(Span(computed.request, computed.start, count))
                token_ids += computed.request.token_ids[computed.start + 1 : computed.start + 1 + count]
                rows += computed.rows
        return Followed(self.batches.arrays(spans, token_ids, rows), order) if spans else None

    def forget(self, requests: Sequence[Request]) -> None:
        self._seen.forget(requests)

    def _goes_on(self, computed: ComputedTokens, has_hidden: bool) -> bool:
        request, count = computed.request, len(computed.rows)
        if request.status is not RequestStatus.RUNNING:
            return False
        speculation = request.speculation
        if speculation is None or speculation.method != self._method or not has_hidden:
            self._seen.lose(request, computed.start, count)
            return False
        if self._seen.seen(request) < computed.start:
            request.speculation = None  # it would draft blindly from now on
        return self._seen.follow(request, computed.start, count)
