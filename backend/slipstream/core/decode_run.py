"""Decodes that go on: all running requests, step after step, each with one token, no drafts and nothing to decide.

Engine thread. The scheduler looks at each request of a first step; the steps after it only count, until a request
joins, leaves, fills the pool or comes to its last tokens. Knows no queues and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.latencies import note_decodes
from slipstream.core.outputs import StepOutput
from slipstream.core.request import Request
from slipstream.core.stats import Stats
from slipstream.core.step import ScheduledStep


class DecodeRun:
    """requests: of a scheduled step, in which each of them has decoded. The scheduler drops the run when one of them
    leaves or another joins. num_left: steps in which none can reach its length limit or has to wait for its last token.
    """

    def __init__(self, requests: Sequence[Request], cache: KVCacheManager, num_left: int) -> None:
        self._requests = list(requests)
        self._cache = cache
        self._num_left = num_left
        self._num_steps = 0
        self._num_computed_tokens = [request.num_computed_tokens for request in requests]
        self._token_ids = [request.token_ids for request in requests]
        self._times = [request.times for request in requests]
        self._stop_ids = frozenset().union(*{request.stop_conditions.token_ids for request in requests})
        self._by_offset: list[list[Request]] = [[] for _ in range(cache.block_size)]  # of the first step in a block
        for request in requests:
            self._by_offset[request.num_computed_tokens % cache.block_size].append(request)
        self._filled: list[Request] = []  # a block of theirs, since the last `commit`

    @classmethod
    def after(cls, requests: Sequence[Request], cache: KVCacheManager) -> DecodeRun | None:
        """The run of the steps after one in which these requests have decoded; None if one of them needs a look."""
        num_left = min(map(_num_left, requests))
        return cls(requests, cache, num_left) if num_left > 0 else None

    def schedule(self, step: ScheduledStep, budget: int) -> bool:
        """Schedule a token of each request. False, without a row, if the run is over, tokens or blocks are short."""
        requests, block_size = self._requests, self._cache.block_size
        if self._num_left <= 0 or len(requests) > budget:
            return False
        grown = self._grow(self._by_offset[-self._num_steps % block_size])
        if grown is None:
            return False
        self._num_left -= 1
        self._num_steps += 1
        for request in requests:
            request.num_computed_tokens += 1
            request.num_output_placeholders += 1
        self._filled += self._by_offset[-self._num_steps % block_size]
        step.run, step.grown = self, grown
        step.requests, step.num_computed_tokens = requests[:], self._num_computed_tokens
        step.fill_decodes()
        self._num_computed_tokens = [num_computed + 1 for num_computed in self._num_computed_tokens]
        return True

    def commit(self, sampled_token_ids: Sequence[list[int]], now_ns: int, stats: Stats) -> list[StepOutput] | None:
        """`Scheduler.commit` for a step of this run, if no request has left since. None, changing nothing, if a token
        may end one."""
        if not self._stop_ids.isdisjoint(chain.from_iterable(sampled_token_ids)):
            return None
        last_ns = self._times[0].last_token_ns  # all have had their last token in the step before
        rows = zip(self._requests, self._token_ids, self._times, sampled_token_ids, strict=True)
        for request, token_ids, times, new_token_ids in rows:
            token_ids += new_token_ids
            request.num_output_placeholders -= 1
            times.last_token_ns = now_ns
        for request in self._filled:
            self._cache.commit(request)
        self._filled = []
        note_decodes(stats, len(self._requests), last_ns, now_ns)
        return list(map(StepOutput, self._requests, sampled_token_ids))

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


def _num_left(request: Request) -> int:
    """Steps before the one that may end a request by its length; none if drafts, a grammar or stop words have to be
    looked at in every step."""
    stop = request.stop_conditions
    if request.speculation is not None or request.grammar_state is not None or stop.has_words:
        return 0
    return min(request.ahead_limit, stop.max_len) - 1 - len(request.token_ids) - request.num_output_placeholders
