"""Verifications that go on: all running requests, step after step, each with a chain of drafts and the same settings.

Engine thread. Each step is read before the next is scheduled, so that nothing is pending. What a step needs of its
requests is kept in columns, and a step that has looked at each request of such a step makes them. They are made anew
when a request comes, ends or is preempted. Knows no queues and no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import add, attrgetter, ge, sub

from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.latencies import note_alike_times, note_times
from slipstream.core.outputs import DecodedTokens, StepOutputs
from slipstream.core.request import FinishReason, Request
from slipstream.core.speculation import Speculation, record_verified
from slipstream.core.stats import Stats
from slipstream.core.step import ScheduledStep

_drafts: Callable[[Request], list[int]] = attrgetter("draft_token_ids")
_parents: Callable[[Request], list[int]] = attrgetter("draft_parents")
_num_slots: Callable[[Request], int] = attrgetter("num_slots")


class VerifyRun:
    """requests: all that run, of a step that has looked. speculation: the settings of all of them.

    token_ids, times, max_lens, sequence_ids: of the requests. stop_ids: of all together. drafts: of each request, in
    the last step. alike: of the last commit, requests by the numbers of their drafts and of the tokens that these gave.
    is_intact: they all run still, and no other one does.
    """

    def __init__(self, step: ScheduledStep, speculation: Speculation, cache: KVCacheManager) -> None:
        requests = step.requests
        self._cache = cache
        self.speculation = speculation
        self.requests = requests[:]
        self.token_ids = [request.token_ids for request in requests]
        self.times = [request.times for request in requests]
        self.max_lens = [request.stop_conditions.max_len for request in requests]
        self.sequence_ids = [request.sequence_id for request in requests]
        self.stop_ids: frozenset[int] = frozenset().union(*(one.stop_conditions.token_ids for one in requests))
        self.drafts = list(map(_drafts, requests))
        self.alike: Counter[tuple[int, int]] = Counter()
        self.is_intact = True
        self._is_committed = False
        last_ns = {clock.last_token_ns for clock in self.times}
        self._last_ns = last_ns.pop() if len(last_ns) == 1 else 0  # of all requests' last token; 0: of different steps

    @classmethod
    def after(cls, step: ScheduledStep, running: Sequence[Request], cache: KVCacheManager) -> VerifyRun | None:
        """The run that begins with a step which has looked at each request. None if one of them is to be looked at in
        the next one as well, or is not in the step."""
        speculation = step.requests[0].speculation if step.requests else None
        if speculation is None or step.requests != running or cache.groups.num_groups > 1:
            return None
        for request in step.requests:
            stop, has_tree = request.stop_conditions, bool(request.draft_parents)
            if request.speculation is not speculation or request.num_output_placeholders > 1 or has_tree:
                return None
            if stop.has_words or request.grammar_state is not None or request.search is not None:
                return None
        return cls(step, speculation, cache)

    def schedule(self, step: ScheduledStep, budget: int, running: Sequence[Request]) -> int | None:
        """Schedule a token and the drafts of each request. Returns how many tokens these are; None, without a row, if
        drafts have to be cut, blocks are short, or the last step is not committed."""
        requests = self.requests
        if not (self._is_committed and requests == running) or any(map(_parents, requests)):
            return None
        drafts, firsts = list(map(_drafts, requests)), [len(known) - 1 for known in self.token_ids]
        counts = [1 + len(own) for own in drafts]
        num_tokens, ends = sum(counts), list(map(add, firsts, counts))
        if 2 * (num_tokens - len(requests)) > budget - len(requests) or any(map(ge, ends, self.max_lens)):
            return None
        if not self._grow(ends):
            return None
        for request, end in zip(requests, ends):
            request.num_computed_tokens = end
            request.num_output_placeholders = 1
        self.drafts, self._is_committed = drafts, False
        step.requests, step.num_computed_tokens, step.verify_run = requests[:], firsts, self
        step.fill_decodes(counts)
        return num_tokens

    def commit(
        self,
        step: ScheduledStep,
        sampled_token_ids: list[list[int]],
        now_ns: int,
        stats: Stats,
        leave: Callable[[Request], None],
    ) -> StepOutputs:
        """`Scheduler.commit` for a step of this run. leave: called with each request that ends."""
        requests, size, no_drafts = self.requests, self._cache.block_size, list[int]()
        num_new = list(map(len, sampled_token_ids))
        new, over = self._end(sampled_token_ids, num_new)
        filled: list[Request] = []
        rows = zip(requests, self.token_ids, new, step.num_drafts, num_new)
        for request, known, own, num_drafts, count in rows:
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
        self.alike = Counter(zip(step.num_drafts, num_new))
        for (num_drafts, count), number in self.alike.items():
            if num_drafts:
                record_verified(stats, self.speculation.method, num_drafts, num_drafts, count - 1, number)
        sampled = DecodedTokens(requests, sampled_token_ids, ended)
        self._note_times(stats, sampled, now_ns)
        return StepOutputs((sampled,))

    def least_left(self) -> int:
        """Tokens that each request may have at least, before its length ends it."""
        return min(map(sub, self.max_lens, map(len, self.token_ids)))

    def are_held(self, num_more: int) -> bool:
        """Whether each request has slots for its tokens and num_more behind them."""
        needed = [len(known) + num_more for known in self.token_ids]
        return all(map(ge, map(_num_slots, self.requests), needed))

    def short_of(self, num_more: int) -> list[tuple[Request, int]]:
        """The requests, with the number of slots, that have none for num_more tokens behind those of the last step."""
        needed = [len(known) + len(own) + num_more - 1 for known, own in zip(self.token_ids, self.drafts)]
        return [(request, count) for request, count in zip(self.requests, needed) if count > request.num_slots]

    # ---- parts

    def _grow(self, ends: Sequence[int]) -> bool:
        """Hold blocks for so many tokens of each request. False: they are short."""
        cache, size = self._cache, self._cache.block_size
        short = [(request, end) for request, end in zip(self.requests, ends) if end > request.num_slots]
        if all(end <= request.num_slots + size for request, end in short):
            return not short or cache.add_blocks([request for request, _ in short])
        return all(cache.allocate(request, end) for request, end in short)

    def _end(self, sampled: list[list[int]], num_new: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Find requests that end, by their length or a stop token, perhaps another one's. Returns the tokens that each
        request has still to be given, and the indices of those that end, whose new tokens are cut."""
        lengths = map(add, map(len, self.token_ids), num_new)
        looked = [index for index, is_long in enumerate(map(ge, lengths, self.max_lens)) if is_long]
        stop_ids = self.stop_ids
        if stop_ids and not stop_ids.isdisjoint(chain.from_iterable(sampled)):
            stopped = (index for index, own in enumerate(sampled) if not stop_ids.isdisjoint(own))
            looked = sorted({*looked, *stopped})
        if not looked:
            return sampled, looked
        left, requests = sampled[:], self.requests
        over = [at for at in looked if requests[at].stop_conditions.extend(requests[at], sampled[at])]
        for index in looked:
            left[index] = []
        return left, over

    def _note_times(self, stats: Stats, sampled: DecodedTokens, now_ns: int) -> None:
        last_ns, self._last_ns = self._last_ns, now_ns
        if not last_ns:
            note_times(stats, sampled, now_ns)
            return
        for clock in self.times:
            clock.last_token_ns = now_ns
        note_alike_times(stats, sampled, self._counts(sampled), last_ns, now_ns)

    def _counts(self, sampled: DecodedTokens) -> Mapping[int, int]:
        """Requests of the last step by their number of new tokens."""
        if sampled.ended:  # whose tokens are cut
            return Counter(map(len, sampled.token_ids))
        counts: dict[int, int] = {}
        for (_, count), number in self.alike.items():
            counts[count] = counts.get(count, 0) + number
        return counts
