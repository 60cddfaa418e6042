"""What the next step computes: one loop over running, then waiting requests under one token budget, without phases.

Engine thread only. Each request has num_computed_tokens chasing its tokens plus drafts; that single idea covers
in-flight batching, chunked prefill, prefix cache hits, speculation and resume after preemption. All is deterministic,
ties go by order of arrival. Knows no tensors and no model. Source: the idea of vLLM v1's scheduler; arXiv:2309.06180.

A step may be scheduled before the one before it is committed (never two): its decodes then go on from tokens that are
sampled but not known yet (num_pending_tokens), but for requests whose next token cannot be drawn without knowing them.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from slipstream.core.admission import check_fits
from slipstream.core.config import SCHEDULER_POLICIES, SchedulerConfig
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.core.kv_cache import FoundBlock, KVCacheManager
from slipstream.core.latencies import note_times
from slipstream.core.outputs import StepOutput
from slipstream.core.queue_order import ExpiryQueue, SortKey, sort_key
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.speculation import DraftPlanner, clip_drafts, settle_drafts
from slipstream.core.stats import FINISHED_METRIC, Metric, Stats
from slipstream.core.step import ScheduledRequest, ScheduledStep

_MAX_SKIPPED = 64  # waiting requests looked past in one step because their prefix is being computed
_LAST = (float("inf"), 0)  # above every sort_key
_sort_key: Callable[[Request], SortKey] = attrgetter("sort_key")


class Scheduler:
    """Owns all requests from `add` to their end.

    Fairness: every running decode gets its token before any prefill gets one, drafts use at most half of what is left,
    and the number of running requests never exceeds the budget, so both always advance. Prefills, begun or waiting,
    go by priority and age (core/queue_order.py), and nobody overtakes a request that waits for blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        max_model_len: int,
        stats: Stats | None = None,
        planner: DraftPlanner | None = None,
    ) -> None:
        if config.policy not in SCHEDULER_POLICIES:
            raise ConfigError("policy", config.policy, f"accepted: {', '.join(SCHEDULER_POLICIES)}")
        self.config = config
        self.cache = cache
        self.max_model_len = max_model_len
        self.stats = Stats() if stats is None else stats
        self.planner = DraftPlanner() if planner is None else planner
        # a step cannot carry more requests than tokens
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._never_evicts = config.policy == "guaranteed_no_evict"
        self._running: list[Request] = []  # both sorted by sort_key
        self._waiting: list[Request] = []
        self._num_added = 0
        self._num_promised_blocks = 0  # worst-case blocks of all running requests
        self._num_turn_tokens = 0  # of the next step's budget, kept for a whole prompt that decodes left no room for
        self.expiries = ExpiryQueue()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def may_admit(self) -> bool:
        # there is a seat, if not blocks
        return len(self._running) < self._max_running and any(not request.is_held for request in self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def live_requests(self) -> Iterator[Request]:
        return chain(self._running, self._waiting)

    # ---- in and out

    def add(self, request: Request, now: float | None = None) -> None:
        """Let a request wait for its first step. now: time.monotonic().

        Raises RequestError if it can never run here, CapacityError if too many wait already.
        """
        self.add_all((request,), now)

    def add_all(self, requests: Sequence[Request], now: float | None = None) -> None:
        """`add` all sequences of one client request, or none of them."""
        for request in requests:
            request.stop_conditions = check_fits(request, self.config, self.cache, self.max_model_len)
        limit = self.config.max_waiting_requests + max(0, self._max_running - len(self._running))
        if len(self._waiting) + len(requests) > limit:
            raise CapacityError(
                f"{len(self._waiting)} requests are waiting and {len(self._running)} running; "
                f"max_waiting_requests={self.config.max_waiting_requests}, max_num_seqs={self.config.max_num_seqs}"
            )
        now = time.monotonic() if now is None else now
        for request in requests:
            self._num_added += 1
            request.sort_key = sort_key(request.priority, self._num_added, now, self.config.priority_aging_s)
            request.status = RequestStatus.WAITING
            request.runs_ahead = not request.params.needs_last_token
            if self.config.default_max_queue_ms > 0:
                request.queue_deadline = now + self.config.default_max_queue_ms / 1e3
            self.expiries.add(request)
            insort(self._waiting, request, key=_sort_key)

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None, error: str = ""
    ) -> StepOutput | None:
        """End a request from outside (cancel, stop string, error); its blocks are free at once.

        Returns its last output, or None if it has ended already (so a second call is harmless).
        """
        if request.is_finished:
            return None
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error
        self._leave(request)
        return StepOutput(request, [], reason, error=error)

    def expire(self, now: float) -> list[StepOutput]:
        """End the requests whose deadline or queue time-out has passed. now: time.monotonic()."""
        ended = (self.finish(request, FinishReason.TIMEOUT) for request in self.expiries.pop(now))
        return [output for output in ended if output is not None]

    # ---- the step

    def schedule(self, admits: bool = True) -> ScheduledStep:
        """Choose the next step's rows and give them their blocks. `commit` or `finish` must follow for each request.

        admits: requests that wait may begin. Without rows although there is work: all wait for the commit of a step.
        """
        step = ScheduledStep()
        self.planner.begin_step(len(self._running))
        num_reserved = self._num_turn_tokens if admits else 0
        self._num_turn_tokens -= num_reserved
        budget = self.config.max_num_batched_tokens - num_reserved
        prefills: list[Request] = []
        if self._running:
            budget = self._schedule_decodes(step, budget, prefills)
        can_admit = admits and bool(self._waiting) and not step.preempted
        if prefills:
            if can_admit and _sort_key(self._waiting[0]) < _sort_key(prefills[0]):
                budget = self._schedule_waiting(step, budget, num_reserved > 0, before=_sort_key(prefills[0]))
            budget = self._schedule_prefills(step, budget, prefills)
        budget += num_reserved
        if can_admit:
            budget = self._schedule_waiting(step, budget, num_reserved > 0)
        step.num_scheduled_tokens = self.config.max_num_batched_tokens - budget
        if step.requests:
            step.copies = self.cache.take_copies()
        return step

    def _schedule_decodes(self, step: ScheduledStep, budget: int, prefills: list[Request]) -> int:
        """One token and the drafts of each request that has only its last token to compute; collect the others."""
        add_row = step.requests.append
        block_size = self.cache.block_size
        draft_budget = (budget - len(self._running)) // 2
        for request in self._running:  # a preemption pops from the end of this list, which ends the loop sooner
            num_computed, num_pending = request.num_computed_tokens, request.num_pending_tokens
            if request.is_held or (num_pending and not self._may_run_ahead(request)):
                continue
            if len(request.token_ids) + num_pending - num_computed != 1:
                prefills.append(request)
                continue
            if budget <= 0:
                break
            num_new = 1
            if request.draft_token_ids:
                num_new += clip_drafts(request, draft_budget)
            if num_computed + num_new > len(request.block_ids) * block_size:
                num_new = self._grow(request, num_new, step)
                if num_new == 0:
                    break
            add_row(ScheduledRequest(request, num_computed, num_new, True, num_new - 1))
            request.num_computed_tokens = num_computed + num_new
            request.num_pending_tokens = num_pending + 1
            budget -= num_new
            draft_budget -= num_new - 1
        return budget

    def _schedule_prefills(self, step: ScheduledStep, budget: int, prefills: list[Request]) -> int:
        """Go on with the prompts that earlier steps began; their blocks they have."""
        for request in prefills:
            num_missing = request.num_tokens - request.num_computed_tokens
            num_new = min(num_missing, budget)
            if num_new <= 0:
                break
            _add_prefill(step, request, num_new, num_missing)
            budget -= num_new
        return budget

    def _schedule_waiting(self, step: ScheduledStep, budget: int, is_turn: bool, before: SortKey = _LAST) -> int:
        """Admit in order those whose sort_key is below `before`, until tokens, seats or blocks run out."""
        index = num_skipped = 0
        while budget > 0 and index < len(self._waiting) and num_skipped < _MAX_SKIPPED:
            request = self._waiting[index]
            if request.sort_key >= before or len(self._running) >= self._max_running:
                break
            prefix = [] if request.is_held else self.cache.find_prefix(request)
            if request.is_held or self.cache.is_prefix_underway(request, len(prefix)):
                index, num_skipped = index + 1, num_skipped + (not request.is_held)
                continue
            if not self.cache.can_admit(request, prefix, self._num_spare_blocks(request)):
                break
            num_missing = request.num_tokens - len(prefix) * self.cache.block_size
            num_new = min(num_missing, budget)
            if num_new < num_missing and not self._may_chunk(num_missing):
                self._num_turn_tokens = 0 if is_turn else num_missing
                break
            del self._waiting[index]
            self._start(request, prefix)
            _add_prefill(step, request, num_new, num_missing)
            budget -= num_new
        return budget

    def withdraw(self, step: ScheduledStep, requests: list[Request]) -> None:
        """Before `commit`: these requests' rows of the step came to nothing; they wait as if preempted."""
        for row in step.requests:
            request = row.request
            if request in requests and not request.is_finished:
                row.samples = False
                request.num_pending_tokens -= 1
                if request.status is RequestStatus.RUNNING:
                    self._preempt(request)

    def commit(
        self,
        step: ScheduledStep,
        sampled_token_ids: Sequence[list[int]],
        draft_token_ids: Sequence[list[int]] | None = None,
    ) -> list[StepOutput]:
        """Take a step's result: tokens, ends, freed blocks, published prefixes.

        sampled_token_ids: one list per step.requests: accepted drafts and the token after them, empty where `samples`
        is False; the lists become StepOutput.new_token_ids, cut after the token that ends the request.
        draft_token_ids: drafts for the next step, likewise aligned; only for steps that are not scheduled ahead.
        Returns the news in step order; a request that was finished meanwhile has none, one that was preempted does.
        """
        now_ns = time.time_ns()
        block_size = self.cache.block_size
        outputs: list[StepOutput] = []
        for row, new_token_ids in zip(step.requests, sampled_token_ids, strict=True):
            request = row.request
            if request.is_finished:
                continue
            assert bool(new_token_ids) == row.samples, "tokens for the rows that sample, and for no other"
            is_over = False
            if new_token_ids:
                request.num_pending_tokens -= 1
                num_drafts = len(request.draft_token_ids)
                if num_drafts:
                    settle_drafts(request, len(new_token_ids), self.stats)
                is_over = request.stop_conditions.extend(request, new_token_ids)
                if num_drafts:  # those rejected, or cut off by a stop, were not computed after all
                    request.num_computed_tokens = len(request.token_ids) - 1
                outputs.append(StepOutput(request, new_token_ids, request.finish_reason))
            # blocks that the step under way is filling may be shared too: who reads them runs after it
            if request.num_computed_tokens >= (request.num_published_blocks + 1) * block_size:
                self.cache.commit(request)
            if is_over:
                self._leave(request)
        note_times(self.stats, outputs, now_ns)
        if draft_token_ids is not None:
            for row, drafts in zip(step.requests, draft_token_ids, strict=True):
                assert not row.request.num_pending_tokens or not drafts, "drafts for a request that runs ahead"
                row.request.draft_token_ids = [] if row.request.is_finished else drafts
        return outputs

    def record_gauges(self) -> None:
        """Bring the gauges of `stats` up to date. O(blocks in use), for the search for leaks: not for every step."""
        stats, cache = self.stats, self.cache
        stats.set(Metric.REQUESTS_RUNNING, len(self._running))
        stats.set(Metric.REQUESTS_WAITING, len(self._waiting))
        stats.set(Metric.KV_BLOCKS_TOTAL, cache.num_blocks)
        stats.set(Metric.KV_BLOCKS_FREE, cache.num_free_blocks)
        stats.set(Metric.KV_BLOCKS_USED, cache.num_used_blocks)
        stats.set(Metric.KV_BLOCKS_LEAKED, cache.leaked_blocks(self.live_requests))
        if cache.host is not None:
            cache.host.record(stats)

    def most_slots(self, request: Request) -> int:
        """Slots that a request may hold while it drafts: past its own end too, unless its blocks are promised."""
        return request.stop_conditions.max_len if self._never_evicts else self.max_model_len

    # ---- parts

    def _may_run_ahead(self, request: Request) -> bool:
        """Whether to compute beyond tokens that are not known yet; not when they are sure to end the request."""
        num_tokens = len(request.token_ids) + request.num_pending_tokens
        if not request.runs_ahead or request.draft_token_ids or num_tokens >= request.stop_conditions.max_len:
            return False
        return self.planner.num_drafts(request) == 0

    def _may_chunk(self, num_missing: int) -> bool:
        """Without chunked prefill only what exceeds a whole step is split: a preempted request that has grown."""
        return self.config.enable_chunked_prefill or num_missing > self.config.max_num_batched_tokens

    def _worst_blocks(self, request: Request) -> int:
        return self.cache.num_blocks_for(request.stop_conditions.max_len)

    def _num_spare_blocks(self, request: Request) -> int:
        """Free blocks that admitting this request must leave.

        guaranteed_no_evict: all that running requests and this one may still ask for. Promised less held is exact under
        prefix sharing: a shared block is held by each sharer, and when one ends its share of the promise ends with it,
        while the number of free blocks can only rise. max_utilization: some room to grow for those who run, before a
        preempted request comes back only to be preempted again.
        """
        if self._never_evicts:
            num_owed = self._num_promised_blocks - self.cache.pool.num_references
            return num_owed + self._worst_blocks(request) - self.cache.num_blocks_for(request.num_tokens)
        return len(self._running) if request.num_preemptions else 0

    def _start(self, request: Request, prefix: list[FoundBlock]) -> None:
        num_cached = self.cache.admit(request, prefix)
        self.stats.add(Metric.PREFIX_QUERIES, request.num_tokens if self.cache.enable_prefix_caching else 0)
        self.stats.add(Metric.PREFIX_HITS, num_cached)
        if request.times.first_scheduled_ns == 0:
            request.times.first_scheduled_ns = now_ns = time.time_ns()
            self.stats.add(Metric.PROMPT_TOKENS, request.num_prompt_tokens)
            if request.times.arrival_ns:
                self.stats.observe(Metric.QUEUE_TIME, max(0, now_ns - request.times.arrival_ns) * 1e-9)
        request.status = RequestStatus.RUNNING
        request.queue_deadline = None
        self._num_promised_blocks += self._worst_blocks(request)
        insort(self._running, request, key=_sort_key)

    def _grow(self, request: Request, num_new: int, step: ScheduledStep) -> int:
        """Find blocks for a decode, at the cost of its drafts and then of the last in order.

        Returns its number of new tokens, 0 if it was the last itself and had to go.
        """
        while not self.cache.allocate(request, request.num_computed_tokens + num_new):
            if num_new > 1:
                request.drop_drafts()
                num_new = 1
                continue
            assert not self._never_evicts, "guaranteed_no_evict has promised more blocks than there are"
            victim = self._running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return 0
        return num_new

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks away; it waits at its old place in the order and recomputes all its tokens."""
        del self._running[bisect_left(self._running, request.sort_key, key=_sort_key)]
        self._num_promised_blocks -= self._worst_blocks(request)
        self.cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.drop_drafts()
        request.num_preemptions += 1
        self.stats.add(Metric.PREEMPTIONS)
        insort(self._waiting, request, key=_sort_key)

    def _leave(self, request: Request) -> None:
        """Take an ended request out of its list and its blocks back."""
        is_running = request.status is RequestStatus.RUNNING
        queue = self._running if is_running else self._waiting
        index = bisect_left(queue, request.sort_key, key=_sort_key)
        if index < len(queue) and queue[index] is request:  # else it was never added
            del queue[index]
        if is_running:
            self._num_promised_blocks -= self._worst_blocks(request)
            self.cache.free(request)
        request.status = RequestStatus.FINISHED
        request.drop_drafts()
        reason = request.finish_reason
        assert reason is not None
        self.stats.add(FINISHED_METRIC[reason])
        if reason is FinishReason.CANCELLED:
            self.stats.add(Metric.CANCELLATIONS)
        if request.times.arrival_ns:
            self.stats.observe(Metric.E2E_TIME, max(0, time.time_ns() - request.times.arrival_ns) * 1e-9)


def _add_prefill(step: ScheduledStep, request: Request, num_new: int, num_missing: int) -> None:
    samples = num_new == num_missing
    step.requests.append(ScheduledRequest(request, request.num_computed_tokens, num_new, samples))
    request.num_computed_tokens += num_new
    request.num_pending_tokens += samples
