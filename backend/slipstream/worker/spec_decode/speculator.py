"""Runs the loaded drafters: heads directly after a step on the device, proposers after it was read. Engine thread.

The engine decides which requests draft, and when; its decisions come with StepInput and DraftInput.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from slipstream_kernels import ops

from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.step_costs import StepCosts
from slipstream.worker.cuda_graphs import StepTimes
from slipstream.worker.graph_shapes import DraftLayout
from slipstream.worker.host_copy import HostCopy
from slipstream.worker.interface import (
    AlikeBudgets,
    DraftBudget,
    DrafterInfo,
    DraftInput,
    DraftResult,
    DraftTokens,
)
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.request_state import RequestStates
from slipstream.worker.spec_decode.interface import (
    PROPOSERS,
    ChainProposer,
    DraftHead,
    DraftReadiness,
    DraftRequest,
    Proposer,
    SpeculatorContext,
)

# Host time of a draft model beside its device time: the host starts it after reading a verification and reads it before
# the next. Measured on a host with an H200; the planner starts from it.
HOST_SECONDS, HOST_SECONDS_OF_REQUEST = 1.5e-3, 40e-6
_NO_DRAFTS = DraftTokens()


@dataclass(slots=True)
class HeadOutputs:
    """Results of heads after a step, by method. tokens: drafts of each request, on the device; copies: the same, being
    copied to the host. updated: methods that wrote their caches without drafting."""

    tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, HostCopy] = field(default_factory=dict)
    updated: set[str] = field(default_factory=set)


class Speculator:
    """One per worker, also when no method is loaded."""

    def __init__(self, methods: Sequence[str], context: SpeculatorContext) -> None:
        self._drafters = {method: PROPOSERS.get(method)(context) for method in methods}
        self._proposers = {name: one for name, one in self._drafters.items() if isinstance(one, Proposer)}
        self._chain_proposers = {name: one for name, one in self._proposers.items() if isinstance(one, ChainProposer)}
        self._heads = {name: one for name, one in self._drafters.items() if isinstance(one, DraftHead)}
        self.draft_probs: dict[int, torch.Tensor] = {}  # distributions of drawn drafts, by request id

    @property
    def layout(self) -> DraftLayout:
        """The layout of drafts of requests that set no number."""
        drafters = self._drafters.values()
        return DraftLayout(
            num_drafts=min(max((drafter.num_drafts for drafter in drafters), default=0), MAX_DRAFT_TOKENS),
            has_trees=any(drafter.drafts_trees for drafter in drafters),
            are_ragged=bool(self._proposers) or len(self._heads) > 1,
            reads_all_rows=any(head.reads_all_rows for head in self._heads.values()),
            follows_prompts=any(info.follows_prompts for info in self.infos),
            num_scratch_slots=max((head.num_scratch_slots for head in self._heads.values()), default=0),
        )

    @property
    def infos(self) -> tuple[DrafterInfo, ...]:
        found = []
        for method, drafter in self._drafters.items():
            head = self._heads.get(method)
            levels, reads_all = (head.num_levels, head.reads_all_rows) if head is not None else (0, False)
            kinds = head is not None, reads_all, drafter.drafts_trees, method in self._chain_proposers
            found.append(DrafterInfo(method, drafter.num_drafts, levels, drafter.num_scratch_slots, *kinds))
        return tuple(found)

    def capture(self, rows: Sequence[ComputedRows]) -> dict[str, dict[int, float]]:
        """Capture drafting after verifications. rows: those of each verification's graph, or without one.

        Returns the seconds of drafting, by method and number of requests."""
        seconds = {method: head.capture(rows) for method, head in self._heads.items()}
        return seconds | {method: _with_host(proposer.seconds()) for method, proposer in self._proposers.items()}

    def run_heads(
        self, draft_methods: Sequence[str], kv_update_methods: Sequence[str], rows: Callable[[], ComputedRows]
    ) -> HeadOutputs:
        """Run heads after a step. rows: makes the step's rows, called only if a head needs them."""
        outputs = HeadOutputs()
        for method in draft_methods:
            outputs.tokens[method] = self._heads[method].draft(rows())
            outputs.copies[method] = HostCopy((outputs.tokens[method],), is_urgent=True)
        for method in kv_update_methods:
            self._heads[method].update_kv(rows())
            outputs.updated.add(method)
        return outputs

    def rows_ahead(self, outputs: HeadOutputs, method: str, num_drafts: int) -> ops.DraftRows:
        """The rows that the next step verifies, when it is launched before this one is read."""
        return self._heads[method].rows_of(outputs.tokens[method], num_drafts)

    def draft(self, drafts: DraftInput, outputs: HeadOutputs, states: RequestStates) -> DraftResult:
        """The drafts of a step's requests, after it was read. outputs: of its heads."""
        found: list[DraftTokens] = [_NO_DRAFTS] * len(drafts.budgets)
        lost_ids, is_behind = list[int](), False
        invalid = self._record_step(drafts, outputs, states, lost_ids)
        chains: list[list[int]] = []
        if (alike := drafts.alike) is not None:
            proposer = self._chain_proposers.get(alike.method)
            if proposer is None:
                chains = _chains(alike, outputs, invalid)
            else:
                chains = proposer.chains(states.of(alike.sequence_ids), alike.num_drafts)
        if not drafts.budgets:
            return DraftResult(found, lost_ids, chains=chains)
        if self.draft_probs:
            for budget in drafts.budgets:
                self.draft_probs.pop(budget.sequence_id, None)
        rows: dict[str, list[Any]] = {}  # what heads have drafted
        proposing: dict[str, list[int]] = {}  # indices of budgets, by method
        for index, budget in enumerate(drafts.budgets):
            method = budget.method
            if method not in self._heads:
                proposing.setdefault(method, []).append(index)
            elif method in outputs.copies and (budget.sequence_id, method) not in invalid:
                if method not in rows:
                    (rows[method],) = outputs.copies[method].lists()
                answer = found[index] = self._heads[method].drafts(budget, rows[method][budget.index])
                assert len(answer.token_ids) <= budget.num_drafts, "more drafts than asked for"
        for method, indices in proposing.items():
            is_behind = self._propose(method, indices, drafts.budgets, states, found) or is_behind
        return DraftResult(found, lost_ids, is_behind, chains)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        for drafter in self._drafters.values():
            drafter.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self.draft_probs.pop(sequence_id, None)

    def _propose(
        self,
        method: str,
        indices: Sequence[int],
        budgets: Sequence[DraftBudget],
        states: RequestStates,
        found: list[DraftTokens],
    ) -> bool:
        """Put a proposer's drafts into their places. indices: of budgets and places. Returns whether it is behind."""
        places, requests, is_behind, state_of = list[int](), list[DraftRequest](), False, states.by_id.get
        for index in indices:
            budget = budgets[index]
            state = state_of(budget.sequence_id)
            if state is not None:
                places.append(index)
                requests.append(DraftRequest(state, budget))
        answers = self._proposers[method].propose(requests) if requests else ()
        for index, request, answer in zip(places, requests, answers, strict=True):
            assert len(answer.token_ids) <= request.budget.num_drafts, "more drafts than asked for"
            if answer.probs is not None:
                self.draft_probs[request.request.sequence_id] = answer.probs
            found[index] = answer
            is_behind = is_behind or answer.is_behind
        return is_behind

    def _record_step(
        self, drafts: DraftInput, outputs: HeadOutputs, states: RequestStates, lost_ids: list[int]
    ) -> set[tuple[int, str]]:
        """Tell the heads what the step computed. Returns (request id, method) of invalid drafts."""
        invalid, ready, state_of = set(), DraftReadiness.READY, states.by_id.get
        for method, head in self._heads.items():
            is_updated, after_step = method in outputs.copies or method in outputs.updated, head.after_step
            if is_updated and not head.reads_all_rows:  # it keeps nothing of a request, and is ready behind each step
                continue
            for sequence_id, start, count in drafts.computed:
                state = state_of(sequence_id)
                readiness = after_step(state, start, count, is_updated) if state is not None else DraftReadiness.BEHIND
                if readiness is ready:
                    continue
                invalid.add((sequence_id, method))
                if readiness is DraftReadiness.LOST and state is not None and state.draft_method == method:
                    lost_ids.append(sequence_id)
        return invalid


def _chains(alike: AlikeBudgets, outputs: HeadOutputs, invalid: set[tuple[int, str]]) -> list[list[int]]:
    """A head's drafts of requests that may all have the same number of them. invalid: (request id, method)."""
    (rows,), num_drafts = outputs.copies[alike.method].lists(), alike.num_drafts
    chains: list[list[int]] = [rows[index][:num_drafts] for index in alike.indices]
    for index, sequence_id in enumerate(alike.sequence_ids) if invalid else ():
        if (sequence_id, alike.method) in invalid:
            chains[index] = []
    return chains


def measured_costs(steps: StepTimes, draft_seconds: Mapping[str, Mapping[int, float]]) -> StepCosts | None:
    """The times measured at start, or None if none were measured."""
    if not steps.seconds:
        return None
    plain: dict[int, float] = {}
    verified: list[tuple[int, int, int, float]] = []
    for shape, seconds in steps.seconds.items():
        if shape.max_query_len == 1:
            plain[shape.num_requests] = seconds
        else:
            verified.append((shape.num_tokens, shape.num_requests, shape.max_query_len, seconds))
    drafting = {method: tuple(sorted(seconds.items())) for method, seconds in draft_seconds.items()}
    of_cached = steps.of_cached_token, steps.context
    return StepCosts(tuple(sorted(plain.items())), tuple(sorted(verified)), drafting, *of_cached)


def _with_host(seconds: Mapping[int, float]) -> dict[int, float]:
    """Add the host time during which the device waits for a proposer. By number of requests."""
    return {count: took + HOST_SECONDS + count * HOST_SECONDS_OF_REQUEST for count, took in seconds.items()}
