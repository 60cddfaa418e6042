"""Verifications that go on: all running requests, step after step, each with a chain of drafts and the same settings.

Engine thread. Each step is read before the next is scheduled, so that nothing is pending. What a step needs of its
requests is kept in columns. The scheduler looks at each request of a first step; then only those are looked at that
come, end or need a block. A run is over when blocks are short, when drafts have to be cut, or when one joins whose
settings are others. Knows no queues and no tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add, attrgetter, ge
from typing import Any

from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.latencies import note_alike_times, note_times
from slipstream.core.outputs import DecodedTokens, StepOutputs
from slipstream.core.queue_order import SortKey
from slipstream.core.request import FinishReason, Request, RequestStatus, RequestTimes
from slipstream.core.speculation import Speculation, record_verified
from slipstream.core.stats import Stats
from slipstream.core.step import ScheduledStep

_drafts: Callable[[Request], list[int]] = attrgetter("draft_token_ids")
_parents: Callable[[Request], list[int]] = attrgetter("draft_parents")
_sort_key: Callable[[Request], SortKey] = attrgetter("sort_key")


@dataclass(slots=True)
class VerifyRows:
    """The first rows of a step: those that a run has scheduled. Its lists are replaced when they change.

    requests, and of each token_ids, times, max_len, sequence_id and the drafts that the step verifies; stop_ids: of all
    together. num_gone: VerifyRun.num_gone when the step was scheduled. alike: of the commit, requests by the numbers of
    their drafts and of the tokens that these gave.
    """

    run: VerifyRun
    requests: list[Request] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    times: list[RequestTimes] = field(default_factory=list)
    max_lens: list[int] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    drafts: list[list[int]] = field(default_factory=list)
    num_gone: int = 0
    alike: Counter[tuple[int, int]] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether none of the requests has ended or lost its blocks since the step was scheduled."""
        return self.num_gone == self.run.num_gone

    def columns(self) -> tuple[list[Any], ...]:
        """Those that do not change while the same requests run."""
        return self.requests, self.token_ids, self.times, self.max_lens, self.sequence_ids

    def without(self, index: int) -> VerifyRows:
        """Those of a later step, without one of them."""
        return _rows(self.run, [own[:index] + own[index + 1 :] for own in self.columns()])

    def that_may(self, num_drafts: int, num_scratch: int) -> list[int]:
        """Indices of the requests that run, may have num_drafts drafts and a token behind them, and have slots for
        num_scratch tokens behind their own."""
        running, rows = RequestStatus.RUNNING, zip(self.requests, map(len, self.token_ids), self.max_lens)
        return [
            index
            for index, (request, num_tokens, max_len) in enumerate(rows)
            if max_len - num_tokens > num_drafts
            and request.num_slots >= num_tokens + num_scratch
            and request.status is running
        ]

    def short_of(self, num_more: int) -> list[tuple[Request, int]]:
        """The requests, with the number of slots, that have none for num_more tokens behind those of the step."""
        needed = [len(known) + len(own) + num_more for known, own in zip(self.token_ids, self.drafts)]
        return [(request, count) for request, count in zip(self.requests, needed) if count > request.num_slots]


class VerifyRun:
    """speculation: the settings of all requests. num_gone: requests that have ended or were preempted."""

    def __init__(
        self, requests: Sequence[Request], prefills: Sequence[Request], speculation: Speculation, cache: KVCacheManager
    ) -> None:
        self._cache = cache
        self.speculation = speculation
        self._rows = VerifyRows(self)  # of the next step
        self._prefills = list(prefills)
        self._is_committed = True
        self._last_ns = 0  # when all requests had their last token; 0: in different steps
        self._are_stops_known = False
        self.num_gone = 0
        self._join(requests)

    @classmethod
    def after(
        cls, step: ScheduledStep, running: Sequence[Request], prefills: Sequence[Request], cache: KVCacheManager
    ) -> VerifyRun | None:
        """The run that begins with a step which has looked at each request, whose rows are decodes so far. None if one
        of them is to be looked at in the next step as well, or is neither in the step nor a prefill."""
        speculation = step.requests[0].speculation if step.requests else None
        if speculation is None or len(step.requests) + len(prefills) < len(running) or cache.groups.num_groups > 1:
            return None
        if not _are_alike(step.requests, speculation):
            return None
        run = cls(step.requests, prefills, speculation, cache)
        run._note(step, list(map(_drafts, step.requests)))
        return run

    def start(self, request: Request) -> None:
        """It runs from now on, with a prompt to compute."""
        insort(self._prefills, request, key=_sort_key)

    def leave(self, request: Request) -> None:
        """It has ended or was preempted."""
        requests = self._rows.requests
        index = bisect_left(requests, request.sort_key, key=_sort_key)
        if index < len(requests) and requests[index] is request:
            self.num_gone += 1
            self._rows, self._are_stops_known = self._rows.without(index), False
        elif request in self._prefills:
            self._prefills.remove(request)

    def end(self) -> None:
        """No later step is of this run; the rows of the last one are looked at."""
        self.num_gone += 1

    def schedule(self, step: ScheduledStep, budget: int, prefills: list[Request], num_running: int) -> int | None:
        """Schedule a token and the drafts of each request; append to `prefills` the others that run and wait for no
        loads. Returns how many tokens these are; None, without a row, if the scheduler has to look at each request."""
        if not self._is_committed:
            return None
        ready = [one for one in self._prefills if not (one.awaits_loads or one.is_held)] if self._prefills else []
        joined = [
            one for one in ready if one.num_computed_tokens + one.num_output_placeholders == len(one.token_ids) - 1
        ]
        if joined:
            if not _are_alike(joined, self.speculation):
                return None
            self._prefills = [request for request in self._prefills if request not in joined]
            ready = [request for request in ready if request not in joined]
            self._join(joined)
        rows = self._rows
        drafts, firsts = list(map(_drafts, rows.requests)), [len(known) - 1 for known in rows.token_ids]
        counts = [1 + len(own) for own in drafts]
        num_tokens, ends = sum(counts), list(map(add, firsts, counts))
        if 2 * (num_tokens - len(counts)) > budget - num_running or any(map(ge, ends, rows.max_lens)):
            return None
        if not counts or any(map(_parents, rows.requests)) or not self._grow(ends):
            return None
        for request, end in zip(rows.requests, ends):
            request.num_computed_tokens = end
            request.num_output_placeholders = 1
        step.requests, step.num_computed_tokens = rows.requests[:], firsts
        step.fill_decodes(counts)
        self._note(step, drafts)
        prefills += ready
        return num_tokens

    def note_committed(self) -> None:
        """The last step is committed, whose rows were looked at."""
        self._is_committed, self._last_ns = True, 0

    def commit(
        self,
        step: ScheduledStep,
        rows: VerifyRows,
        sampled_token_ids: list[list[int]],
        now_ns: int,
        stats: Stats,
        leave: Callable[[Request], None],
    ) -> StepOutputs:
        """`Scheduler.commit` for the rows of this run, which are whole. leave: called with each request that ends."""
        requests, size, no_drafts = rows.requests, self._cache.block_size, list[int]()
        sampled = sampled_token_ids[: len(requests)]
        num_new = list(map(len, sampled))
        new, over = _end(rows, sampled, num_new)
        filled: list[Request] = []
        for request, known, own, num_drafts, count in zip(requests, rows.token_ids, new, step.num_drafts, num_new):
            known += own
            request.num_output_placeholders -= 1
            request.num_computed_tokens = num_computed = len(known) - 1
            if num_drafts:
                request.num_drafted_tokens += num_drafts
                request.num_accepted_tokens += count - 1
                request.draft_token_ids = no_drafts
            if num_computed >= (request.num_published_blocks + 1) * size:
                filled.append(request)
        self._is_committed = True
        ended: dict[int, FinishReason] = {}
        for index in over:
            request = requests[index]
            assert request.finish_reason is not None
            ended[index] = request.finish_reason
            if request in filled:
                filled.remove(request)
                self._cache.commit(request)  # while it has its blocks
            leave(request)
        self._cache.commit_filled(filled)
        rows.alike = alike = Counter(zip(step.num_drafts, num_new))
        for (num_drafts, count), number in alike.items():
            if num_drafts:
                record_verified(stats, self.speculation.method, num_drafts, num_drafts, count - 1, number)
        decoded = DecodedTokens(requests, sampled, ended)
        self._note_times(stats, rows, decoded, now_ns)
        return StepOutputs((decoded,))

    # ---- parts

    def _note(self, step: ScheduledStep, drafts: list[list[int]]) -> None:
        """The step has the rows of now."""
        rows = self._rows
        if not self._are_stops_known:
            rows.stop_ids = frozenset().union(*(one.stop_conditions.token_ids for one in rows.requests))
        self._is_committed, self._are_stops_known = False, True
        step.verified = _rows(self, rows.columns())
        step.verified.stop_ids, step.verified.drafts, step.verified.num_gone = rows.stop_ids, drafts, self.num_gone

    def _join(self, requests: Sequence[Request]) -> None:
        """Add requests whose next token is a decode, in their places by order."""
        last_ns = {request.times.last_token_ns for request in requests}
        if self._rows.requests:
            last_ns.add(self._last_ns)
        self._last_ns = last_ns.pop() if len(last_ns) == 1 else 0
        columns = [own[:] for own in self._rows.columns()]
        for request in requests:
            index = bisect_left(columns[0], request.sort_key, key=_sort_key)
            row = request, request.token_ids, request.times, request.stop_conditions.max_len, request.sequence_id
            for own, value in zip(columns, row):
                own.insert(index, value)
        self._rows, self._are_stops_known = _rows(self, columns), False

    def _grow(self, ends: Sequence[int]) -> bool:
        """Hold blocks for so many tokens of each request. False: they are short."""
        cache, size = self._cache, self._cache.block_size
        short = [(request, end) for request, end in zip(self._rows.requests, ends) if end > request.num_slots]
        if all(end <= request.num_slots + size for request, end in short):
            return not short or cache.add_blocks([request for request, _ in short])
        return all(cache.allocate(request, end) for request, end in short)

    def _note_times(self, stats: Stats, rows: VerifyRows, decoded: DecodedTokens, now_ns: int) -> None:
        last_ns, self._last_ns = self._last_ns, now_ns
        if not last_ns:
            note_times(stats, decoded, now_ns)
            return
        for clock in rows.times:
            clock.last_token_ns = now_ns
        note_alike_times(stats, decoded, _counts(rows, decoded), last_ns, now_ns)


def _rows(run: VerifyRun, columns: Sequence[list[Any]]) -> VerifyRows:
    requests, token_ids, times, max_lens, sequence_ids = columns
    return VerifyRows(run, requests, token_ids, times, max_lens, sequence_ids)


def _are_alike(requests: Iterable[Request], speculation: Speculation) -> bool:
    """Whether these may be in a run: chains of drafts are all that is to be known of them."""
    for request in requests:
        if request.speculation is not speculation or request.grammar_state is not None or request.search is not None:
            return False
        if request.stop_conditions.has_words or request.draft_parents or request.num_output_placeholders > 1:
            return False
    return True


def _end(rows: VerifyRows, sampled: list[list[int]], num_new: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Find requests that end, by their length or a stop token, perhaps another one's. Returns the tokens that each
    request has still to be given, and the indices of those that end, whose new tokens are cut."""
    lengths = map(add, map(len, rows.token_ids), num_new)
    looked = [index for index, is_long in enumerate(map(ge, lengths, rows.max_lens)) if is_long]
    if rows.stop_ids and not rows.stop_ids.isdisjoint(chain.from_iterable(sampled)):
        stopped = (index for index, own in enumerate(sampled) if not rows.stop_ids.isdisjoint(own))
        looked = sorted({*looked, *stopped})
    if not looked:
        return sampled, looked
    left, requests = sampled[:], rows.requests
    over = [at for at in looked if requests[at].stop_conditions.extend(requests[at], sampled[at])]
    for index in looked:
        left[index] = []
    return left, over


def _counts(rows: VerifyRows, decoded: DecodedTokens) -> Mapping[int, int]:
    """Requests of a committed step by their number of new tokens."""
    if decoded.ended or rows.alike is None:  # some are cut
        return Counter(map(len, decoded.token_ids))
    counts: dict[int, int] = {}
    for (_, count), number in rows.alike.items():
        counts[count] = counts.get(count, 0) + number
    return counts
