"""Decodes that go on: all running requests, step after step, each with one token, no drafts and nothing to decide.

Engine thread. The scheduler looks at each request of a first step; the steps after it only count. Requests join when
their prompts are computed and leave when they end; only these are looked at. A run is over when blocks are short, when
one joins whose grammar or stop words have to be looked at in every step, or when drafts are to be made for one of them.
Knows no queues and no tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, TypeVar

from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.latencies import note_decodes, note_lengths
from slipstream.core.outputs import DecodedTokens, StepOutputs
from slipstream.core.queue_order import SortKey
from slipstream.core.request import FinishReason, Request, RequestTimes
from slipstream.core.speculation import Speculation
from slipstream.core.stats import Stats
from slipstream.core.step import ScheduledStep

_sort_key: Callable[[Request], SortKey] = attrgetter("sort_key")
MayDraft = Callable[[Speculation], bool]  # whether drafts are made in this step for requests with these settings

T = TypeVar("T")


class RunRows(NamedTuple):
    """The decodes of a step that a run has scheduled: its first rows.

    token_ids, times: of the requests. grown: those with new blocks since the step before. last: indices of those for
    whom the step samples the last token that fits. stop_ids: of all the requests. num_gone: DecodeRun.num_gone when
    the step was scheduled.
    """

    run: DecodeRun
    requests: list[Request]
    token_ids: list[list[int]]
    times: list[RequestTimes]
    grown: list[Request]
    last: list[int]
    stop_ids: frozenset[int]
    num_gone: int


class DecodeRun:
    """requests: of a scheduled step, in which each of them has decoded. prefills: that run and do not decode yet.

    num_gone: requests that have ended otherwise than by their length, so that a step in flight may have rows of them.
    speculations: different ones of its requests, for none of which drafts are made.
    """

    def __init__(
        self, requests: Iterable[Request], prefills: Sequence[Request], cache: KVCacheManager, may_draft: MayDraft
    ) -> None:
        self._cache = cache
        self._may_draft = may_draft
        self.speculations: dict[tuple[str, int], Speculation] = {}
        self._requests: list[Request] = []  # these lists are replaced when they change: steps in flight have them, too
        self._token_ids: list[list[int]] = []
        self._times: list[RequestTimes] = []
        self._num_computed_tokens: list[int] = []
        self._prefills = list(prefills)
        self._at_length: list[Request] = []  # they wait for the commit of their last token
        self._num_steps = 0
        self._by_offset: list[list[Request]] = [[] for _ in range(cache.block_size)]  # of the first step in a block
        self._ends: dict[int, list[Request]] = {}  # by the step that samples the last token that fits
        self._stop_sets: Counter[frozenset[int]] = Counter()
        self._stop_ids: frozenset[int] = frozenset()
        self._filled: list[Request] = []  # a block of theirs, since the last `commit`
        self.num_gone = 0
        self._join(list(requests))

    @classmethod
    def after(
        cls,
        step: ScheduledStep,
        running: Sequence[Request],
        prefills: Sequence[Request],
        cache: KVCacheManager,
        may_draft: MayDraft,
    ) -> DecodeRun | None:
        """The run of the steps after one that has looked, whose rows are decodes so far. None if a running request
        has neither decoded nor is one of the prefills nor waits for its end or for loads."""
        if len(step.requests) + len(prefills) < len(running):
            known = {request.sequence_id for request in chain(step.requests, prefills)}
            others = [request for request in running if request.sequence_id not in known]
            if not all(request.awaits_loads or _is_at_length(request, may_draft) for request in others):
                return None
            loading = [request for request in others if request.awaits_loads]
            prefills = sorted([*prefills, *loading], key=_sort_key) if loading else prefills
        return cls(step.requests, prefills, cache, may_draft)

    def start(self, request: Request) -> None:
        """It runs from now on, with a prompt to compute."""
        insort(self._prefills, request, key=_sort_key)

    def leave(self, request: Request) -> None:
        """It has ended or was preempted; its tokens are still counted."""
        if request in self._filled:
            self._filled.remove(request)
        index = self._index(request)
        if index is not None:
            self._ends[self._last_step(request)].remove(request)
            self._remove([index])
        elif request in self._at_length:
            self._at_length.remove(request)
        else:
            if request in self._prefills:
                self._prefills.remove(request)
            return
        self.num_gone += 1

    def schedule(self, step: ScheduledStep, budget: int, prefills: list[Request]) -> bool:
        """Schedule a token of each request; append to `prefills` the others that run and wait for no loads. False,
        without a row, if tokens or blocks are short, or one that joins needs a look."""
        if self.speculations and any(map(self._may_draft, self.speculations.values())):
            return False
        ready = [request for request in self._prefills if not request.awaits_loads] if self._prefills else []
        joined = [request for request in ready if _num_missing(request) == 1]
        if joined:
            if not self._are_alike(joined):
                return False
            self._prefills = [request for request in self._prefills if request not in joined]
            ready = [request for request in ready if request not in joined]
            self._join(joined)
        requests, size = self._requests, self._cache.block_size
        if len(requests) > budget:
            return False
        grown = self._grow(self._by_offset[-self._num_steps % size])
        if grown is None:
            return False
        prefills += ready
        self._num_steps += 1
        self._note_filled(self._by_offset[-self._num_steps % size], joined)
        for request in requests:
            request.num_computed_tokens += 1
            request.num_output_placeholders += 1
        ending = self._ends.pop(self._num_steps, None)
        last = sorted(bisect_left(requests, one.sort_key, key=_sort_key) for one in ending) if ending else []
        if requests:
            lists = requests, self._token_ids, self._times
            step.run = RunRows(self, *lists, grown, last, self._stop_ids, self.num_gone)
        step.requests, step.num_computed_tokens = requests[:], self._num_computed_tokens
        step.fill_decodes()
        self._num_computed_tokens = [num_computed + 1 for num_computed in self._num_computed_tokens]
        if ending:
            self._at_length += ending
            self._remove(last)
        return True

    def commit(
        self,
        rows: RunRows,
        sampled_token_ids: list[list[int]],
        now_ns: int,
        stats: Stats,
        leave: Callable[[Request], None],
    ) -> StepOutputs:
        """`Scheduler.commit` for the rows of a step of this run. leave: called with each request that ends."""
        requests, token_ids, times, last = rows.requests, rows.token_ids, rows.times, rows.last
        sampled = sampled_token_ids[: len(requests)]
        if rows.num_gone != self.num_gone:
            gone = [index for index, request in enumerate(requests) if request.is_finished]
            requests, token_ids, times = _without(requests, gone), _without(token_ids, gone), _without(times, gone)
            sampled = _without(sampled, gone)
            last = [index - bisect_left(gone, index) for index in last if index not in gone]
        if not requests:
            return StepOutputs()
        last_ns = times[0].last_token_ns  # all have had their last token in the step before
        for request, known, clock, new_token_ids in zip(requests, token_ids, times, sampled, strict=True):
            known += new_token_ids
            request.num_output_placeholders -= 1
            clock.last_token_ns = now_ns
        if self._filled:
            self._cache.commit_filled(self._filled)
            self._filled = []
        note_decodes(stats, len(requests), last_ns, now_ns)
        ended: dict[int, FinishReason] = {}
        for index in _to_look_at(sampled, last, rows.stop_ids):
            request = requests[index]
            if request.stop_conditions.is_over(request):
                assert request.finish_reason is not None
                ended[index] = request.finish_reason
                if not request.num_output_placeholders and request in self._at_length:  # no step in flight has it
                    self._at_length.remove(request)
                note_lengths(stats, request)
                leave(request)
        return StepOutputs((DecodedTokens(requests, sampled, ended),))

    # ---- parts

    def _are_alike(self, joining: list[Request]) -> bool:
        """Whether these may join: no one `needs_look`, and the last token of each is of the same step as that of all
        others. What is left of a prompt may be one token, too, behind which another request has the first token."""
        if any(needs_look(request, self._may_draft) for request in joining):
            return False
        first = self._requests[0] if self._requests else joining[0]
        num_pending, last_ns = first.num_output_placeholders, first.times.last_token_ns
        if num_pending:
            return all(request.num_output_placeholders == num_pending for request in joining)
        return bool(last_ns) and all(
            request.times.last_token_ns == last_ns and not request.num_output_placeholders for request in joining
        )

    def _join(self, requests: list[Request]) -> None:
        """Add requests whose next token is a decode, in their places by order. Nothing for those at their length."""
        self._requests, self._token_ids, self._times = self._requests[:], self._token_ids[:], self._times[:]
        size = self._cache.block_size
        for request in requests:
            if _is_at_length(request, self._may_draft):
                continue
            if (wanted := request.speculation) is not None:
                self.speculations[wanted.method, wanted.num_draft_tokens] = wanted
            index = bisect_left(self._requests, request.sort_key, key=_sort_key)
            self._requests.insert(index, request)
            self._token_ids.insert(index, request.token_ids)
            self._times.insert(index, request.times)
            self._num_computed_tokens.insert(index, request.num_computed_tokens)
            alike = self._by_offset[(request.num_computed_tokens - self._num_steps) % size]
            insort(alike, request, key=_sort_key)
            self._ends.setdefault(self._last_step(request), []).append(request)
            stop_ids = request.stop_conditions.token_ids
            if not self._stop_sets[stop_ids]:
                self._stop_ids |= stop_ids
            self._stop_sets[stop_ids] += 1

    def _remove(self, indices: list[int]) -> None:
        """Take requests out of all that is counted. indices: ascending."""
        size = self._cache.block_size
        for index in indices:
            request = self._requests[index]
            self._by_offset[(request.num_computed_tokens - self._num_steps) % size].remove(request)
            stop_ids = request.stop_conditions.token_ids
            self._stop_sets[stop_ids] -= 1
            if not self._stop_sets[stop_ids]:
                del self._stop_sets[stop_ids]
                self._stop_ids = frozenset().union(*self._stop_sets)
        self._requests, self._token_ids = _without(self._requests, indices), _without(self._token_ids, indices)
        self._times = _without(self._times, indices)
        self._num_computed_tokens = _without(self._num_computed_tokens, indices)

    def _index(self, request: Request) -> int | None:
        index = bisect_left(self._requests, request.sort_key, key=_sort_key)
        return index if index < len(self._requests) and self._requests[index] is request else None

    def _last_step(self, request: Request) -> int:
        """The step that samples the last token that fits. The same at any time while it is in the run."""
        num_tokens = len(request.token_ids) + request.num_output_placeholders
        return self._num_steps + request.stop_conditions.max_len - num_tokens

    def _note_filled(self, requests: Sequence[Request], joined: Sequence[Request]) -> None:
        """The step fills a block of each of these. A prompt's own commit, if it is to come, finds that block, too."""
        if joined:
            requests = [one for one in requests if not (one.num_output_placeholders and one in joined)]
        self._filled += requests

    def _grow(self, requests: Sequence[Request]) -> list[Request] | None:
        """Allocate the next block of each of these requests that has none. None: blocks are short."""
        grown = [request for request in requests if request.num_computed_tokens >= request.num_slots]
        if self._cache.groups.num_groups == 1:
            return grown if not grown or self._cache.add_blocks(grown) else None
        for request in grown:
            self._cache.advance(request)
            if not self._cache.allocate(request, request.num_computed_tokens + 1):
                return None
        return grown


def needs_look(request: Request, may_draft: MayDraft) -> bool:
    """Whether drafts, a grammar or stop words have to be looked at in every step, or its last token is waited for."""
    drafts = request.speculation is not None and (bool(request.draft_token_ids) or may_draft(request.speculation))
    is_special = drafts or request.grammar_state is not None
    return is_special or request.stop_conditions.has_words or not request.ahead_limit


def _is_at_length(request: Request, may_draft: MayDraft) -> bool:
    """Whether the commit of what is in flight will end it by its length."""
    if needs_look(request, may_draft) or not request.num_output_placeholders:
        return False
    return len(request.token_ids) + request.num_output_placeholders >= request.stop_conditions.max_len


def _num_missing(request: Request) -> int:
    """Tokens that are to be computed, those pending included."""
    return len(request.token_ids) + request.num_output_placeholders - request.num_computed_tokens


def _to_look_at(sampled: Sequence[list[int]], last: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Indices of the requests that may end: by their length, or by a stop token, perhaps another one's."""
    if not stop_ids or stop_ids.isdisjoint(chain.from_iterable(sampled)):
        return last
    return sorted({*last, *(index for index, new_token_ids in enumerate(sampled) if new_token_ids[0] in stop_ids)})


def _without(values: list[T], indices: Sequence[int]) -> list[T]:
    """A copy without those at ascending indices."""
    kept = values[:]
    for index in reversed(indices):
        del kept[index]
    return kept
