"""The drafters that are loaded: heads behind a step, proposers after it. Engine thread.

What is drafted when, and for whom, is the engine's decision: it comes with StepInput and DraftInput.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from slipstream_kernels import ops

from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.step_costs import StepCosts
from slipstream.worker.graph_shapes import DraftForms, GraphShape
from slipstream.worker.host_copy import HostCopy
from slipstream.worker.interface import DrafterInfo, DraftInput, DraftResult, DraftTokens
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.request_state import RequestStates
from slipstream.worker.spec_decode.interface import (
    PROPOSERS,
    DraftHead,
    DraftOutput,
    DraftRequest,
    Proposer,
    SpeculatorContext,
)

# Beside its device time, of a draft model, which the host starts once it has read a verification and reads before the
# next: about what it took on a host with an H200, for a planner to start from.
HOST_SECONDS, HOST_SECONDS_OF_REQUEST = 1.5e-3, 40e-6


@dataclass(frozen=True)
class HeadOutputs:
    """What heads did behind a step, by method. tokens: drafted for each request, on the device; copies: the same on
    its way to the host. followed: methods whose caches were brought along without drafting."""

    tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, HostCopy] = field(default_factory=dict)
    followed: set[str] = field(default_factory=set)


class Speculator:
    """One per worker. With no method loaded nothing is drafted."""

    def __init__(self, methods: Sequence[str], context: SpeculatorContext) -> None:
        self._drafters = {method: PROPOSERS.get(method)(context) for method in methods}
        self._proposers = {name: one for name, one in self._drafters.items() if isinstance(one, Proposer)}
        self._heads = {name: one for name, one in self._drafters.items() if isinstance(one, DraftHead)}
        self.draft_probs: dict[int, torch.Tensor] = {}  # by request id, what its drafts were drawn from

    @property
    def forms(self) -> DraftForms:
        """What drafts look like, of requests that ask for no number."""
        drafters = self._drafters.values()
        return DraftForms(
            num_drafts=min(max((drafter.num_drafts for drafter in drafters), default=0), MAX_DRAFT_TOKENS),
            has_trees=any(drafter.drafts_trees for drafter in drafters),
            are_ragged=bool(self._proposers) or len(self._heads) > 1,
            reads_all_rows=any(head.reads_all_rows for head in self._heads.values()),
        )

    @property
    def infos(self) -> tuple[DrafterInfo, ...]:
        found = []
        for method, drafter in self._drafters.items():
            head = self._heads.get(method)
            levels, reads_all = (head.num_levels, head.reads_all_rows) if head is not None else (0, False)
            scratch = drafter.num_scratch_slots
            found.append(DrafterInfo(method, drafter.num_drafts, levels, scratch, head is not None, reads_all))
        return tuple(found)

    def capture(self, rows: Sequence[ComputedRows]) -> dict[str, dict[int, float]]:
        """Make graphs of what heads do behind verifications; rows: the tensors of each graph of one.

        Returns the seconds that drafting takes, by method and number of requests."""
        seconds = {method: head.capture(rows) for method, head in self._heads.items()}
        return seconds | {method: _with_host(proposer.seconds()) for method, proposer in self._proposers.items()}

    def run_heads(
        self, draft_methods: Sequence[str], follow_methods: Sequence[str], rows: Callable[[], ComputedRows]
    ) -> HeadOutputs:
        """Let heads draft right behind a step. rows: what it computed, asked for only if a head wants it."""
        outputs = HeadOutputs()
        for method in draft_methods:
            outputs.tokens[method] = self._heads[method].draft(rows())
            outputs.copies[method] = HostCopy((outputs.tokens[method],), is_urgent=True)
        for method in follow_methods:
            self._heads[method].follow(rows())
            outputs.followed.add(method)
        return outputs

    def rows_ahead(self, outputs: HeadOutputs, method: str, num_drafts: int) -> ops.DraftRows:
        """What the next step verifies, before this one is read."""
        return self._heads[method].rows_of(outputs.tokens[method], num_drafts)

    def draft(self, drafts: DraftInput, outputs: HeadOutputs, states: RequestStates) -> DraftResult:
        """Drafts of requests of a step that was read. outputs: of heads behind it."""
        result = DraftResult([DraftTokens()] * len(drafts.budgets))
        unsound = self._note(drafts, outputs, states, result.lost_ids)
        wanted: dict[str, list[tuple[int, DraftRequest]]] = {}
        for index, budget in enumerate(drafts.budgets):
            state, method = states.get(budget.sequence_id), budget.method
            self.draft_probs.pop(budget.sequence_id, None)
            is_unread = method in self._heads and (
                method not in outputs.copies or (budget.sequence_id, method) in unsound
            )
            if state is not None and not is_unread:
                request = DraftRequest(state, budget.num_drafts, budget.depth, budget.place, budget.has_scratch)
                wanted.setdefault(method, []).append((index, request))
        for method, some in wanted.items():
            requests = [request for _, request in some]
            if method in self._heads:
                (found,) = outputs.copies[method].lists()
                answers = [self._heads[method].drafts(one, found[one.place]) for one in requests]
            else:
                answers = self._proposers[method].propose(requests)
            for (index, request), answer in zip(some, answers, strict=True):
                result.drafts[index] = self._keep(request, answer)
        return result

    def forget(self, sequence_ids: Sequence[int]) -> None:
        for drafter in self._drafters.values():
            drafter.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self.draft_probs.pop(sequence_id, None)

    def _note(
        self, drafts: DraftInput, outputs: HeadOutputs, states: RequestStates, lost_ids: list[int]
    ) -> set[tuple[int, str]]:
        """Tell the heads what the step computed; returns whose tokens, by which head, are worth nothing."""
        unsound = set()
        for sequence_id, start, count in drafts.computed:
            state = states.get(sequence_id)
            if state is None:
                continue
            for method, head in self._heads.items():
                noted = head.note(state, start, count, method in outputs.copies or method in outputs.followed)
                if not noted.can_draft:
                    unsound.add((sequence_id, method))
                if noted.is_lost and state.draft_method == method:
                    lost_ids.append(sequence_id)
        return unsound

    def _keep(self, request: DraftRequest, answer: DraftOutput) -> DraftTokens:
        assert len(answer.token_ids) <= request.num_drafts, "more drafts than asked for"
        if answer.probs is not None:
            self.draft_probs[request.request.sequence_id] = answer.probs
        return DraftTokens(list(answer.token_ids), list(answer.parents))


def measured_costs(
    step_seconds: Mapping[GraphShape, float], draft_seconds: Mapping[str, Mapping[int, float]]
) -> StepCosts | None:
    """What was measured at start; None where nothing was."""
    if not step_seconds:
        return None
    plain: dict[int, float] = {}
    verified: list[tuple[int, int, int, float]] = []
    for shape, seconds in step_seconds.items():
        if shape.max_query_len == 1:
            plain[shape.num_requests] = seconds
        else:
            verified.append((shape.num_tokens, shape.num_requests, shape.max_query_len, seconds))
    drafting = {method: tuple(sorted(seconds.items())) for method, seconds in draft_seconds.items()}
    return StepCosts(tuple(sorted(plain.items())), tuple(sorted(verified)), drafting)


def _with_host(seconds: Mapping[int, float]) -> dict[int, float]:
    """What a proposer that has work for the device takes while that stands still, by number of requests."""
    return {count: took + HOST_SECONDS + count * HOST_SECONDS_OF_REQUEST for count, took in seconds.items()}
