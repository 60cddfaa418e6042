"""Decides which requests draft, when and how; the worker drafts. Engine thread, except `resolve`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress, islice
from typing import Any

from slipstream.core.config import NO_SPECULATION, EngineConfig
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.errors import RequestError
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.speculation import MeasuredStep, Speculation
from slipstream.core.step import ScheduledStep
from slipstream.core.verify_run import VerifyRows
from slipstream.engine.in_flight import AheadStep, InFlightStep, SampledStep, alike_verifications
from slipstream.engine.step_inputs import StepInputs
from slipstream.worker.interface import AlikeBudgets, DraftBudget, DrafterInfo, DraftInput, DraftResult
from slipstream.worker.request_state import draws_by_itself
from slipstream.worker.spec_decode import PROPOSERS

_NONE_FOUND = (0,)  # the rows of a verification that accepts nothing
# Spare slots per request: enough for about twelve verifications launched ahead.
SPARE_SLOTS = 64


class Drafting:
    """One per engine. drafters: those that the worker has loaded, perhaps none."""

    def __init__(self, config: EngineConfig, drafters: Sequence[DrafterInfo], scheduler: Scheduler) -> None:
        self._config = config.speculation
        self._is_deterministic = config.model.deterministic
        self._scheduler = scheduler
        self._drafters = {drafter.method: drafter for drafter in drafters}
        self._heads = [drafter for drafter in drafters if drafter.is_head]
        self.proposers = [drafter.method for drafter in drafters if not drafter.is_head]
        self._decoded_at = 0.0  # time.monotonic() of the last decode step, if no other step came after it

    @property
    def is_empty(self) -> bool:
        return not self._drafters

    @property
    def needs_hashes(self) -> bool:
        """Whether a drafter has a cache, whose blocks it knows by the hashes of the prefix cache."""
        return any(one.num_scratch_slots or one.reads_all_rows for one in self._drafters.values())

    def resolve(self, params: SamplingParams) -> Speculation | None:
        """The speculation settings of a request. Raises RequestError if the method is not loaded or refuses it."""
        if not self._drafters or params.num_draft_tokens == 0 or params.speculative_method == NO_SPECULATION:
            self._check_off(params)
            return None
        method = params.speculative_method or self._config.loaded[0]
        if method not in self._drafters:
            raise RequestError("speculative_method", f"got {method!r}, loaded: {', '.join(self._drafters)}")
        refusal = PROPOSERS.get(method).refusal(params)
        if refusal is not None:
            raise RequestError("speculative_method", f"{method} cannot serve this request: {refusal}")
        limit = self._config.num_draft_tokens or MAX_DRAFT_TOKENS
        asked = params.num_draft_tokens
        if asked is not None and asked > limit:
            raise RequestError("num_draft_tokens", f"got {asked}, accepted: 0 (no drafts) to {limit}")
        acceptance = params.speculative_acceptance or self._config.acceptance
        if self._is_deterministic and acceptance != "exact":
            raise RequestError("speculative_acceptance", f"got {acceptance!r}, accepted here: exact")
        if params.logprobs is not None and acceptance not in ("exact", "rejection"):
            acceptance = "exact"  # log-probabilities are those of tokens drawn
        may_run_ahead = (params.is_greedy or acceptance == "exact") and draws_by_itself(params, has_grammar=False)
        num_drafts = self._drafters[method].num_drafts
        if asked is not None and (asked < num_drafts or DRAFT_METHODS.get(method).makes_any_number):
            num_drafts = asked
        return _speculation(method, min(num_drafts, MAX_DRAFT_TOKENS), acceptance, may_run_ahead)

    def prepare(self, step: ScheduledStep, is_ahead: bool) -> None:
        """Allocate the blocks that drafting writes after a step, if there are free ones.

        is_ahead: the next verifications may be launched before this step is read and block tables are copied again, so
        they need their blocks now. If no request waits, spare blocks are allocated too: with many requests, one would
        otherwise run out of blocks at nearly every step."""
        if not self._drafters:
            return
        scheduler, cache = self._scheduler, self._scheduler.cache
        is_ahead = is_ahead and scheduler.num_microbatches == 1
        num_spare = 0 if scheduler.num_waiting or not is_ahead else SPARE_SLOTS
        start = 0  # of the requests that are looked at
        if (rows := step.verified) is not None and (drafter := self._drafter_of(rows.run.speculation)) is not None:
            start = 0 if is_ahead and drafter.is_head else len(rows.requests)
            for request, num_slots in rows.short_of(1 + drafter.num_scratch_slots) if start else ():
                cache.allocate(request, min(num_slots, scheduler.admission.most_slots(request)))
        known, drafter = None, None
        lists = step.requests, step.num_computed_tokens, step.num_scheduled_tokens, step.samples, step.num_drafts
        for request, first, count, samples, num_drafts in islice(zip(*lists), start, None):
            if request.speculation is not known:
                known, drafter = request.speculation, self._drafter_of(request.speculation)
            if drafter is None or not samples:
                continue
            goes_ahead = is_ahead and drafter.is_head  # nothing is launched behind what waits for a proposer
            num_slots = _most_slots_after(first + count, drafter, 1 + num_drafts if goes_ahead else 0)
            num_more = num_spare if goes_ahead else 0
            if request.num_slots >= num_slots + num_more:
                continue
            most = scheduler.admission.most_slots(request)
            if not (num_more and cache.allocate(request, min(num_slots + num_more, most))):
                cache.allocate(request, min(num_slots, most))

    def methods_behind(self, step: ScheduledStep) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Heads that draft after a step, and heads that only update their KV caches."""
        if not self._heads:
            return (), ()
        has_prompts = step.total_num_scheduled_tokens > len(step.requests) + sum(step.num_drafts)
        drafting = tuple(head.method for head in self._heads if self._drafts_behind(step, head))
        # a prompt's blocks may be shared with requests that draft, so heads compute all prompts
        updating = [head.method for head in self._heads if head.reads_all_rows and has_prompts]
        return drafting, tuple(method for method in updating if method not in drafting)

    def method_ahead(self, step: ScheduledStep, draft_methods: Sequence[str]) -> str:
        """The head whose drafts the next step verifies, if this is certain before the step is read: its requests will
        have the same numbers of drafts of that head again, and nothing can truncate them. "" if not certain."""
        if not draft_methods or self._scheduler.num_microbatches > 1:  # the stages have steps of other requests
            return ""
        speculation, num_drafts = step.requests[0].speculation, step.num_drafts[0]
        if speculation is None or speculation.method not in draft_methods or not num_drafts:
            return ""
        size, counts = len(step.requests), step.num_scheduled_tokens
        if step.num_drafts.count(num_drafts) < size or counts.count(1 + num_drafts) < size or not all(step.samples):
            return ""
        return speculation.method if self._go_on_alike(step, self._drafters[speculation.method], num_drafts) else ""

    def must_read_before_next(self, in_flight: Sequence[InFlightStep]) -> bool:
        """Whether the next step depends on accepted drafts; with stages it has requests of its own."""
        is_shared = self._scheduler.num_microbatches == 1
        return bool(is_shared and in_flight and self.method_after(in_flight[-1].step))

    def method_after(self, step: ScheduledStep) -> str:
        """The method of the first request that may draft after a step; "" if none may."""
        if not self._drafters:
            return ""
        planner, known, may_draft = self._scheduler.planner, None, False
        for request, num_drafts, samples in zip(step.requests, step.num_drafts, step.samples):
            speculation = request.speculation
            if speculation is None:
                continue
            if speculation is not known:
                known, may_draft = speculation, planner.num_drafts_of(speculation) > 0
            if num_drafts or (samples and may_draft):
                return speculation.method
        return ""

    def input_after(
        self,
        in_flight: InFlightStep,
        token_ids: Sequence[list[int]],
        inputs: StepInputs,
        ahead: AheadStep | None = None,
    ) -> DraftInput | None:
        """The worker's draft input after a committed step; None if no request drafts. token_ids: the new tokens of each
        request. ahead: what is launched ahead, perhaps behind this step."""
        step = in_flight.step
        if ahead is not None and ahead.in_flight.step is step:
            found = self._alike_after(in_flight, token_ids, inputs)
            if found is not None:
                return found
        if step.run is not None and len(step.run.requests) == len(step.requests) and not self._heads:
            return None  # no drafts are made for a run, and proposers hear of its tokens when some are
        places = in_flight.indices if in_flight.indices is not None else range(len(token_ids))
        lists = step.requests, step.num_computed_tokens, step.num_scheduled_tokens, step.samples, step.num_drafts
        rows: Iterable[tuple[Any, ...]] = zip(*lists, token_ids, places)
        drafts, concerned = DraftInput(in_flight.step_id, []), list[Request]()
        if in_flight.indices is None and step.verified is not None:
            rows = compress(rows, self._add_chains(drafts, concerned, step, step.verified, token_ids))
        self._add_budgets(drafts, concerned, rows)
        if not concerned:
            return None
        drafts.updates = inputs.updates(concerned)
        return drafts

    def assign(self, step: ScheduledStep, drafts: DraftInput, result: DraftResult) -> None:
        """Store the worker's drafts in the requests."""
        if result.is_behind:
            self._decoded_at = 0.0  # the step's time says nothing of those that draft
        if drafts.alike is not None:
            for index, chain in zip(drafts.alike.indices, result.chains, strict=True):
                request = step.requests[index]
                request.draft_token_ids = chain
                if request.draft_parents:
                    request.draft_parents = []
        by_id = {request.sequence_id: request for request in step.requests} if drafts.budgets or result.lost_ids else {}
        for sequence_id in result.lost_ids:
            by_id[sequence_id].speculation = None
            self._scheduler.runs.end_verifications()
        for budget, tokens in zip(drafts.budgets, result.drafts, strict=True):
            request = by_id[budget.sequence_id]
            request.draft_token_ids, request.draft_parents = tokens.token_ids, tokens.parents
        if not result.is_behind:
            self._note_found(drafts, result)

    def measure(self, step: ScheduledStep, sampled: SampledStep) -> None:
        """Report accepted drafts, and the time since the previous decode step, to the planner."""
        now, planner, count = time.monotonic(), self._scheduler.planner, len(step.requests)
        for (method, num_drafts, rows), number in alike_verifications(step, sampled).items():
            planner.observe(method, num_drafts, rows, number)
        is_decode = step.layered is None and step.total_num_scheduled_tokens == count + sum(step.num_drafts)
        num_tokens = sum(map(len, sampled.token_ids))  # none if all have ended meanwhile
        if is_decode and self._decoded_at and num_tokens:
            seconds, method = now - self._decoded_at, self.method_after(step)
            context = sum(step.num_computed_tokens) // count
            planner.measure(
                MeasuredStep(count, step.total_num_scheduled_tokens, seconds, num_tokens / count, method, context)
            )
        self._decoded_at = now if is_decode else 0.0

    # ---- parts

    def _note_found(self, drafts: DraftInput, result: DraftResult) -> None:
        """Report to the planner how many drafts were found. A request without any gets one token, as if none had been
        accepted."""
        planner, budgets = self._scheduler.planner, drafts.budgets
        if (alike := drafts.alike) is not None:
            planner.note_found(alike.method, alike.num_drafts * len(result.chains), sum(map(len, result.chains)))
            planner.observe(alike.method, alike.num_drafts, _NONE_FOUND, result.chains.count([]))
        wanted, found = [budget.num_drafts for budget in budgets], [len(tokens.token_ids) for tokens in result.drafts]
        for method in {budget.method for budget in budgets}:
            are_own = [budget.method == method for budget in budgets]
            planner.note_found(method, sum(compress(wanted, are_own)), sum(compress(found, are_own)))
        for budget, num_found in zip(budgets, found) if not all(found) else ():
            if not num_found:
                planner.observe(budget.method, budget.num_drafts, _NONE_FOUND)

    def _go_on_alike(self, step: ScheduledStep, head: DrafterInfo, num_drafts: int) -> bool:
        """Whether the next step of each request of a verification certainly has the same number of drafts of this head,
        verified exactly."""
        least_left = 2 * head.num_levels + 2
        num_more = _most_slots_after(1 + num_drafts, head, 1 + num_drafts)
        known = None
        for request, first in zip(step.requests, step.num_computed_tokens):
            speculation = request.speculation
            if speculation is not known:
                if speculation is None or not speculation.may_run_ahead or speculation.method != head.method:
                    return False
                if self._scheduler.planner.num_drafts_of(speculation) != num_drafts:
                    return False
                known = speculation
            # with an adapter a verification runs without the graph that the next one is launched with
            if request.adapter is not None or request.grammar_state is not None:
                return False
            num_left = request.stop_conditions.max_len - len(request.token_ids)
            if num_left <= least_left or request.num_slots < first + num_more:
                return False
        return True

    def _drafts_behind(self, step: ScheduledStep, head: DrafterInfo) -> bool:
        """Whether a request of the step drafts with this head after it."""
        known, is_own = None, False
        for request, samples in zip(step.requests, step.samples):
            if request.speculation is not known:
                known, is_own = request.speculation, self._drafter_of(request.speculation) is head
            if is_own and samples:
                return True
        return False

    def _drafter_of(self, speculation: Speculation | None) -> DrafterInfo | None:
        """What requests with these settings draft with after a row that samples, or None; known before the step is
        computed."""
        if speculation is None or not self._scheduler.planner.num_drafts_of(speculation):
            return None
        return self._drafters[speculation.method]

    def _alike_after(
        self, in_flight: InFlightStep, token_ids: Sequence[list[int]], inputs: StepInputs
    ) -> DraftInput | None:
        """`input_after` of a verification behind which the next is launched: `_go_on_alike` has looked at each request
        then, and nothing but its end has changed since. None if something has, or drafts are trees, which are cut."""
        step, running = in_flight.step, RequestStatus.RUNNING
        expected, num_drafts = step.requests[0].speculation, step.num_drafts[0]
        if expected is None or self._drafters[expected.method].drafts_trees:
            return None
        if self._scheduler.planner.num_drafts_of(expected) != num_drafts:
            return None
        if (whole := step.verified) is not None and whole.is_whole and len(whole.requests) == len(step.requests):
            ids = whole.sequence_ids
            computed = list(zip(ids, step.num_computed_tokens, map(len, token_ids)))
            alike = AlikeBudgets(expected.method, num_drafts, ids, range(len(ids)))
            return DraftInput(in_flight.step_id, [], computed, inputs.updates(whole.requests), alike)
        sequence_ids, indices, concerned, computed = list[int](), list[int](), list[Request](), []
        rows = zip(step.requests, step.num_computed_tokens, token_ids)
        for index, (request, first, new) in enumerate(rows):  # none has been left out of the launched step
            if request.status is not running:
                continue
            count = len(new)
            if request.speculation is not expected or request.num_computed_tokens != first + count:
                return None
            concerned.append(request)
            computed.append((request.sequence_id, first, count))
            sequence_ids.append(request.sequence_id)
            indices.append(index)
        if not concerned:
            return None
        alike = AlikeBudgets(expected.method, num_drafts, sequence_ids, indices)
        return DraftInput(in_flight.step_id, [], computed, inputs.updates(concerned), alike)

    def _add_chains(
        self,
        drafts: DraftInput,
        concerned: list[Request],
        step: ScheduledStep,
        rows: VerifyRows,
        token_ids: Sequence[list[int]],
    ) -> Sequence[bool]:
        """Have the proposer of a run make chains for all of its requests that may have as many drafts. Returns which
        requests of the step are left to look at."""
        speculation = rows.run.speculation
        drafter, count = self._drafters[speculation.method], len(step.requests)
        num_drafts = self._scheduler.planner.num_drafts_of(speculation) if drafter.makes_chains else 0
        indices = rows.that_may(num_drafts, drafter.num_scratch_slots) if num_drafts else []
        if not indices:
            return [True] * count
        requests, ids = rows.requests, rows.sequence_ids
        if len(indices) < len(requests):
            requests, ids = [requests[index] for index in indices], [ids[index] for index in indices]
        drafts.alike = AlikeBudgets(speculation.method, num_drafts, ids, indices)
        concerned += requests
        if self._heads:  # they hear of all that is computed
            firsts = step.num_computed_tokens
            drafts.computed += [(known, firsts[index], len(token_ids[index])) for known, index in zip(ids, indices)]
        if len(indices) == count:
            return ()
        left = [True] * count
        for index in indices:
            left[index] = False
        return left

    def _add_budgets(self, drafts: DraftInput, concerned: list[Request], rows: Iterable[tuple[Any, ...]]) -> None:
        """Look at each of these requests. rows: the lists of a step, new tokens, and places in the launched one."""
        has_heads, running, planner = bool(self._heads), RequestStatus.RUNNING, self._scheduler.planner
        known, num_most, num_scratch = None, 0, 0  # the last settings, and what they allow
        for request, first, count, samples, num_drafts, new, place in rows:
            if num_drafts:
                count = len(new)
            # preempted meanwhile and begun again: these tokens are computed once more, or cached in blocks that are
            # still being loaded, of which the step that computes with them tells the worker
            if (
                request.status is not running
                or request.num_computed_tokens < first + count
                or request.num_sent_blocks < 0
            ):
                continue
            if (speculation := request.speculation) is not known:
                known, num_most = speculation, 0 if speculation is None else planner.num_drafts_of(speculation)
                num_scratch = self._drafters[speculation.method].num_scratch_slots if speculation is not None else 0
            budget = self._budget(request, place, num_most, num_scratch) if num_most and samples else None
            if budget is not None:
                drafts.budgets.append(budget)
            if has_heads:
                drafts.computed.append((request.sequence_id, first, count))
            if has_heads or budget is not None:
                concerned.append(request)

    def _budget(self, request: Request, place: int, num_drafts: int, num_scratch: int) -> DraftBudget | None:
        """The draft budget of a running request after a row that sampled, or None. place: in the launched step.
        num_drafts, num_scratch: drafts that it may have, and slots behind its tokens that drafting writes."""
        num_tokens, speculation, grammar_state = len(request.token_ids), request.speculation, request.grammar_state
        if request.num_computed_tokens != num_tokens - 1 or (grammar_state is not None and grammar_state.is_slow):
            return None
        num_left = request.stop_conditions.max_len - num_tokens - 1
        if num_drafts > num_left:
            num_drafts = num_left
        num_slots, has_scratch = num_tokens + num_scratch, True
        if num_scratch > num_left:  # perhaps more than it may have
            num_most = self._scheduler.admission.most_slots(request)
            num_slots, has_scratch = min(num_slots, num_most), num_slots <= num_most
        if speculation is None or num_drafts <= 0 or request.num_slots < num_slots:
            return None
        return DraftBudget(request.sequence_id, speculation.method, num_drafts, num_left, place, has_scratch)

    def _check_off(self, params: SamplingParams) -> None:
        """Refuse a request that asks for drafts if no method is loaded."""
        if self._drafters:
            return
        if params.speculative_method not in (None, NO_SPECULATION):
            raise RequestError("speculative_method", f"got {params.speculative_method!r}, loaded: none")
        if params.num_draft_tokens:
            accepted = "accepted: 0, because the model has no speculative_method"
            raise RequestError("num_draft_tokens", f"got {params.num_draft_tokens}, {accepted}")


def _most_slots_after(num_tokens: int, drafter: DrafterInfo, num_ahead: int) -> int:
    """Slots that a request may need after a row that ends with its num_tokens-th token: of its drafts, the token after
    them, num_ahead rows and scratch."""
    return num_tokens + 1 + num_ahead + drafter.num_scratch_slots


# One object for all requests of the same settings, so that a loop over them sees at a glance what it has looked at.
_speculation = cache(Speculation)
