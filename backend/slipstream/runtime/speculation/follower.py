"""What MTP modules and EAGLE heads share: their cache follows the model's, one token later. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.core.request import Request, RequestStatus
from slipstream.nn.batch import ForwardBatch
from slipstream.runtime.host_copy import to_device
from slipstream.runtime.speculation.draft_batch import DraftBatches, Span
from slipstream.runtime.speculation.proposer import ComputedTokens, StepResult, Surroundings
from slipstream.runtime.speculation.seen_tokens import SeenTokens


@dataclass(frozen=True)
class Followed:
    """batch: what the head must compute to keep up; rows: of the step's hidden states, row by row of the batch.

    last_rows: place in StepResult.computed -> the request's last row in the batch.
    """

    batch: ForwardBatch
    rows: list[int]
    last_rows: dict[int, int]


class Follower:
    """method: requests of which are followed."""

    def __init__(self, method: str, surroundings: Surroundings) -> None:
        config, plan = surroundings.config, surroundings.plan
        self._method = method
        self._device = surroundings.hardware.device
        self.batches = DraftBatches(plan.block_size, plan.max_model_len, config.scheduler.max_num_seqs, self._device)
        self._seen = SeenTokens(plan.num_blocks, plan.block_size)

    def follow(self, result: StepResult) -> Followed | None:
        """Token i + 1 for each token i that the step computed; None: nothing to do."""
        spans: list[Span] = []
        rows: list[int] = []
        token_ids: list[int] = []
        last_rows: dict[int, int] = {}
        for place, computed in enumerate(result.computed):
            if self._goes_on(computed, result.hidden is not None):
                count = len(computed.rows)
                spans.append(Span(computed.request, computed.start, count))
                token_ids += computed.request.token_ids[computed.start + 1 : computed.start + 1 + count]
                rows += computed.rows
                last_rows[place] = len(rows) - 1
        if not spans:
            return None
        batch = self.batches.build(spans, to_device(token_ids, torch.int64, self._device))
        return Followed(batch, rows, last_rows)

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
