"""Schedules each step: one loop over running, then waiting requests under one token budget, without phases.

Engine thread only. Each request has num_computed_tokens chasing its tokens plus drafts; this one rule covers in-flight
batching, chunked prefill, prefix cache hits, speculation and resume after preemption. Deterministic: ties are broken
by order of arrival. Knows no tensors and no model. Source: the scheduler of vLLM v1; arXiv:2309.06180.

One step may be scheduled before the previous one is committed. Its decodes continue from tokens that are sampled but
not yet known to the host (num_output_placeholders). A request that needs its last token on the host waits for the
commit.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from slipstream.core.adapters import AdapterSlots
from slipstream.core.admission import Admission
from slipstream.core.config import SchedulerConfig
from slipstream.core.finish import StopConditions
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.latencies import note_end, note_lengths, note_start, note_times
from slipstream.core.outputs import DecodedTokens, StepOutput, StepOutputs
from slipstream.core.prefill_budget import PrefillBudget
from slipstream.core.prefix import Prefix
from slipstream.core.queue_order import ExpiryQueue, SortKey, next_key, sort_key
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.runs import Runs
from slipstream.core.speculation import DraftPlanner, VerifiedDrafts, truncate_drafts
from slipstream.core.stats import Metric, Stats
from slipstream.core.step import ScheduledStep

_MAX_SKIPPED = 64  # waiting requests skipped in one step because another request is computing their prefix
_MAX_FOUND = 32_768  # cached blocks of requests that may start beside decodes: some 6 ms of the engine's thread
_LAST = (float("inf"), 0)  # above every sort_key
_sort_key: Callable[[Request], SortKey] = attrgetter("sort_key")


class Scheduler:
    """Owns all requests from `add` to their end.

    Fairness: decodes are scheduled before prefills, drafts get at most half of the remaining budget, and there are
    never more running requests than budget tokens, so decodes and prefills both advance. Started and waiting prefills
    are ordered by priority and age (core/queue_order.py). No request overtakes one that waits for blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        max_model_len: int,
        stats: Stats | None = None,
        planner: DraftPlanner | None = None,
        prefill_budget: PrefillBudget | None = None,
        num_adapter_slots: int = 0,
    ) -> None:
        self.config = config
        self.cache = cache
        self.max_model_len = max_model_len
        self.stats = Stats() if stats is None else stats
        self.planner = DraftPlanner() if planner is None else planner
        self.admission = Admission(config, cache, max_model_len)
        self._running: list[Request] = []  # both sorted by sort_key
        self._waiting: list[Request] = []
        self.runs = Runs(cache, lambda wanted: self.planner.num_drafts_of(wanted) > 0)
        self._num_added = 0
        self.prefill_budget = prefill_budget or PrefillBudget.of(config)
        self._num_turn_tokens = 0  # tokens of the next step reserved for an unchunked prompt that decodes crowded out
        self.expiries, self.adapters = ExpiryQueue(), AdapterSlots(num_adapter_slots)
        self.num_microbatches = 1  # above 1: steps in flight, none of which has a request with a token in another

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def may_admit(self) -> bool:
        return len(self._running) < self.admission.max_running and any(not request.is_held for request in self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def live_requests(self) -> Iterator[Request]:
        return chain(self._running, self._waiting)

    # ---- in and out

    def add(self, request: Request, now: float | None = None) -> None:
        """`add_all` for a request of one sequence."""
        self.add_all((request,), now)

    def add_all(self, requests: Sequence[Request], now: float | None = None) -> None:
        """Queue all sequences of one client request, or none. Raises RequestError, CapacityError. now: monotonic s.
        Those with stop conditions have been found to fit, by the thread that brought them."""
        for request in requests:
            if request.stop_conditions is None:
                request.stop_conditions = self.admission.check_fits(request)
        self.check_capacity(len(requests))
        now = time.monotonic() if now is None else now
        for request in requests:
            self._num_added += 1
            request.sort_key = sort_key(request.priority, self._num_added, now, self.config.priority_aging_s)
            request.status = RequestStatus.WAITING
            is_last_needed = self.num_microbatches > 1 or request.params.needs_last_token
            request.ahead_limit = 0 if is_last_needed else request.stop_conditions.max_len
            if self.config.default_max_queue_ms > 0:
                request.queue_deadline = now + self.config.default_max_queue_ms / 1e3
            self.expiries.add(request)
            insort(self._waiting, request, key=_sort_key)

    def check_capacity(self, num_sequences: int, num_arriving: int = 0) -> None:
        """Any thread. Raises as Admission.check_capacity. num_arriving: sequences that will be added before these."""
        self.admission.check_capacity(num_sequences, self.num_running, self.num_waiting + num_arriving)

    def add_next(self, request: Request, last: Request) -> None:
        """Queue what goes on where `last` has ended, in its place, however many wait."""
        request.stop_conditions = StopConditions(request, self.max_model_len)
        self._num_added += 1
        request.sort_key = next_key(last.sort_key, self._num_added)
        self.expiries.add(request)
        insort(self._waiting, request, key=_sort_key)

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None, error: str = ""
    ) -> StepOutput | None:
        """End a request from outside (cancel, stop string, error). Returns its last output, None if it had ended."""
        if request.is_finished:
            return None
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        if reason is FinishReason.STOP:
            note_lengths(self.stats, request)
        self._leave(request)
        return StepOutput(request, [], reason, error=error)

    def expire(self, now: float) -> list[StepOutput]:
        """End the requests whose deadline or queue time-out has passed."""
        ended = (self.finish(request, FinishReason.TIMEOUT) for request in self.expiries.pop(now))
        return [output for output in ended if output is not None]

    # ---- the step

    def schedule(self, admits: bool = True) -> ScheduledStep:
        """Choose the next step's rows and allocate their blocks. `commit` or `finish` must follow for each request.

        admits: whether waiting requests may start. Empty despite `has_work`: all requests wait for a commit.
        """
        step = ScheduledStep()
        self.planner.begin_step(len(self._running))
        num_reserved = self._num_turn_tokens if admits else 0
        self._num_turn_tokens -= num_reserved
        budget = self.config.max_num_batched_tokens - num_reserved
        prefills: list[Request] = []
        num_tokens = self.runs.schedule(step, budget, prefills, len(self._running))
        if num_tokens is not None:
            budget -= num_tokens
        elif self._running:
            budget = self._schedule_decodes(step, budget, prefills)
        prefills = self.cache.begin_step(len(self._running), prefills)
        self.prefill_budget.begin_step(step, len(self._waiting))
        can_admit = admits and bool(self._waiting) and not step.preempted
        self.adapters.begin_step()
        if prefills:
            if can_admit and _sort_key(self._waiting[0]) < _sort_key(prefills[0]):
                budget = self._schedule_waiting(step, budget, num_reserved > 0, before=_sort_key(prefills[0]))
            budget = self._schedule_prefills(step, budget, prefills)
        budget += num_reserved
        if can_admit and not step.preempted:
            budget = self._schedule_waiting(step, budget, num_reserved > 0)
        step.total_num_scheduled_tokens = self.config.max_num_batched_tokens - budget
        if step.requests:
            step.copies, step.adapters = self.cache.take_copies(step), self.adapters.take_loads()
        return step

    def _schedule_decodes(self, step: ScheduledStep, budget: int, prefills: list[Request]) -> int:
        """Schedule one token plus drafts for each decoding request; append the others to `prefills`."""
        add_request, add_computed = step.requests.append, step.num_computed_tokens.append
        num_drafts_of, counts = self.planner.num_drafts, list[int]()
        draft_budget = (budget - len(self._running)) // 2
        num_most = -(-len(self._running) // self.num_microbatches)  # so that each step in flight gets some of them
        for request in self._running:  # a preemption pops from the end of this list and so shortens the loop
            num_computed, num_pending = request.num_computed_tokens, request.num_output_placeholders
            num_tokens = len(request.token_ids) + num_pending
            if request.is_held or request.awaits_loads:
                continue
            if num_pending:  # go on without them, unless they have to be known first
                is_drafting = request.speculation is not None and (request.draft_token_ids or num_drafts_of(request))
                if is_drafting or num_tokens >= request.ahead_limit:
                    continue
            if num_tokens - num_computed != 1:
                prefills.append(request)
                continue
            if budget <= 0 or len(step.requests) >= num_most:
                break
            num_new = 1
            if request.draft_token_ids:
                num_new += truncate_drafts(request, draft_budget)
            if num_computed + num_new > request.num_slots:
                num_new = self._grow(request, num_new, step)
                if num_new == 0:
                    break
            add_request(request)
            add_computed(num_computed)
            counts.append(num_new)
            request.num_computed_tokens = num_computed + num_new
            request.num_output_placeholders = num_pending + 1
            budget -= num_new
            draft_budget -= num_new - 1
        step.fill_decodes(counts)
        if self.num_microbatches == 1:
            self.runs.note_look(step, self._running, prefills)
        return budget

    def _schedule_prefills(self, step: ScheduledStep, budget: int, prefills: list[Request]) -> int:
        """Continue prompts that earlier steps started; only windowed groups do not have all their blocks yet."""
        for request in prefills:
            num_missing = request.num_tokens - request.num_computed_tokens
            if self.cache.windows is None and self.prefill_budget.take_layers(request, num_missing, budget):
                break
            num_new = self.prefill_budget.take(request.num_computed_tokens, num_missing, budget)
            if num_new <= 0:
                break
            if self.cache.windows is not None and not self._move_window(request, num_new):
                step.preempted.append(request)
                continue
            step.add_prefill(request, num_new, num_missing)
            budget -= num_new
        return budget

    def _schedule_waiting(self, step: ScheduledStep, budget: int, is_turn: bool, before: SortKey = _LAST) -> int:
        """Admit waiting requests with sort_key < `before` in order, until tokens, max_num_seqs or blocks run out."""
        index = num_skipped = num_found = 0
        while budget > 0 and index < len(self._waiting) and num_skipped < _MAX_SKIPPED and num_found < _MAX_FOUND:
            request = self._waiting[index]
            if request.sort_key >= before or len(self._running) >= self.admission.max_running:
                break
            waits = request.is_blocked or (request.adapter is not None and self.adapters.must_wait(request.adapter))
            prefix = None if waits or self.cache.awaits_prefix(request) else self.cache.find_prefix(request)
            num_found += len(prefix) if prefix is not None and step.num_decodes else 0
            if prefix is None or self.cache.is_prefix_underway(request, len(prefix)):
                index, num_skipped = index + 1, num_skipped + (not waits)
                continue
            num_spare = self.admission.num_spare_blocks(request, len(self._running))
            if not self.cache.can_admit(request, prefix, num_spare):
                break
            if self.cache.must_wait(prefix):
                self._start(self._waiting.pop(index), prefix)
                continue
            num_missing = request.num_tokens - len(prefix) * self.cache.block_size
            num_new = self.prefill_budget.take_first(request, request.num_tokens - num_missing, num_missing, budget)
            if num_new <= 0:
                break
            # without chunked prefill only a preempted request that outgrew the budget of a step is split
            if num_new < num_missing <= self.config.max_num_batched_tokens and not self.config.enable_chunked_prefill:
                self._num_turn_tokens = 0 if is_turn else num_missing
                break
            self._start(self._waiting.pop(index), prefix)
            step.add_prefill(request, num_new, num_missing)
            budget -= num_new
        return budget

    def _move_window(self, request: Request, num_new: int) -> bool:
        """Find blocks for a prompt's next chunk. False: preempted, as others share what its window gave up."""
        self.cache.advance(request)
        if self.cache.allocate(request, request.num_computed_tokens + num_new):
            return True
        self._preempt(request)
        return False

    def withdraw(self, step: ScheduledStep, requests: list[Request]) -> None:
        """Discard these requests' rows of a step before its `commit`; the requests wait as if preempted."""
        for place, request in enumerate(step.requests):
            if request in requests and not request.is_finished:
                step.withdraw(place)
                request.num_output_placeholders -= 1
                request.drop_drafts()
                if request.status is RequestStatus.RUNNING:
                    self._preempt(request)

    def commit(self, step: ScheduledStep, sampled_token_ids: list[list[int]]) -> StepOutputs:
        """Apply a step's result: append tokens, end requests, free blocks, publish prefixes.

        sampled_token_ids: one list per step.requests: accepted drafts and the token after them, empty where `samples`
        is False; the lists become StepOutput.new_token_ids, truncated after the token that ends the request.
        Returns outputs in step order: none for requests finished meanwhile, one for those preempted meanwhile.
        """
        self.prefill_budget.note_done(step)
        if step.layered is not None and step.layered.request.status is RequestStatus.RUNNING:
            self.cache.commit(step.layered.request)
        now_ns = time.time_ns()
        outputs, first = self.runs.commit(step, sampled_token_ids, now_ns, self.stats, self._leave)
        if outputs and first == len(step.requests):
            return outputs
        requests, token_ids, ended = list[Request](), list[list[int]](), dict[int, FinishReason]()
        filled: list[Request] = []
        block_size, finished, verified = self.cache.block_size, RequestStatus.FINISHED, VerifiedDrafts()
        rows = zip(step.requests[first:], step.samples[first:], sampled_token_ids[first:], strict=True)
        for request, samples, new_token_ids in rows:
            if request.status is finished:
                continue
            is_over = False
            if samples:
                assert new_token_ids, "tokens for the rows that sample"
                request.num_output_placeholders -= 1
                has_drafts = bool(request.draft_token_ids)
                if has_drafts:
                    verified.add(request, len(new_token_ids))
                is_over = request.stop_conditions.extend(request, new_token_ids)
                # drafts that were rejected or cut off by a stop do not count as computed
                if has_drafts and request.status is RequestStatus.RUNNING:
                    request.num_computed_tokens = len(request.token_ids) - 1
                requests.append(request)
                token_ids.append(new_token_ids)
            # blocks that the in-flight step is filling may be shared too: their readers run in later steps
            if request.num_computed_tokens >= (request.num_published_blocks + 1) * block_size:
                filled.append(request)
            if is_over:
                assert request.finish_reason is not None
                ended[len(requests) - 1] = request.finish_reason
                if filled and filled[-1] is request:
                    self.cache.commit(filled.pop())  # while it has its blocks
                self._leave(request)
        self.cache.commit_filled(filled)
        verified.record(self.stats)
        if requests:
            sampled = DecodedTokens(requests, token_ids, ended)
            note_times(self.stats, sampled, now_ns)
            outputs += StepOutputs((sampled,))
        return outputs

    # ---- parts

    def _start(self, request: Request, prefix: Prefix) -> None:
        num_cached = self.cache.admit(request, prefix)
        note_start(self.stats, request, request.num_tokens if self.cache.enable_prefix_caching else 0, num_cached)
        request.status, request.queue_deadline = RequestStatus.RUNNING, None
        self.admission.promise(request)
        if request.adapter is not None:
            request.adapter_slot = self.adapters.hold(request.adapter)
        insort(self._running, request, key=_sort_key)
        self.runs.start(request)

    def _grow(self, request: Request, num_new: int, step: ScheduledStep) -> int:
        """Allocate blocks for a decode; if short, drop its drafts, then preempt the last request in order.

        Returns the number of tokens to compute, 0 if the request itself was preempted.
        """
        self.cache.advance(request)
        while not self.cache.allocate(request, request.num_computed_tokens + num_new):
            if num_new > 1:
                request.drop_drafts()
                num_new = 1
                continue
            assert not self.admission.never_evicts, "guaranteed_no_evict has promised more blocks than there are"
            victim = self._running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return 0
        return num_new

    def _preempt(self, request: Request) -> None:
        """Free a request's blocks and requeue it with its old sort_key; it recomputes all its tokens."""
        del self._running[bisect_left(self._running, request.sort_key, key=_sort_key)]
        self._give_back(request)
        request.note_preempted()
        self.stats.add(Metric.PREEMPTIONS)
        insort(self._waiting, request, key=_sort_key)

    def _give_back(self, request: Request) -> None:
        """What it holds as one of the running requests, which change by that, as in `_start`."""
        self.runs.leave(request)
        self.admission.release(request)
        self.cache.free(request)
        if request.adapter is not None:
            self.adapters.release(request.adapter)

    def _leave(self, request: Request) -> None:
        """Remove an ended request from its lists and free its blocks."""
        self.expiries.discard(request)
        is_running = request.status is RequestStatus.RUNNING
        queue = self._running if is_running else self._waiting
        index = bisect_left(queue, request.sort_key, key=_sort_key)
        if index < len(queue) and queue[index] is request:  # else it was never added
            del queue[index]
        if is_running:
            self._give_back(request)
        request.status = RequestStatus.FINISHED
        request.drop_drafts()
        note_end(self.stats, request)
