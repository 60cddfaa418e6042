"""A fake model over a fake KV cache, which drives core/scheduler.py without torch and detects any wrong block.

Each slot of the cache stores the hash of the prefix "computed" into it. Before a token is sampled, every slot of the
request's block table is compared with its tokens, which detects blocks that were lost, shared wrongly or used twice.
With num_ahead=1 each step is scheduled before the previous one is committed, with more several are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, chain

from slipstream.core.config import SchedulerConfig
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.kv_groups import ONE_GROUP, KVGroups
from slipstream.core.layered_prefill import LayeredChunk
from slipstream.core.outputs import StepOutput
from slipstream.core.prefill_budget import PrefillBudget
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.speculation import Speculation
from slipstream.core.step import ScheduledRequest, ScheduledStep

VOCAB = 1009
SIZE = 4  # block_size
CHUNK = 64  # tokens


def _hashes(state: int, token_ids: Sequence[int]) -> list[int]:
    return list(accumulate(token_ids, lambda state, token: hash((state, token)), initial=state))[1:]


_hashes_of_chunk = functools.lru_cache(1 << 13)(_hashes)


def prefix_hashes(token_ids: list[int]) -> list[int]:
    """A hash of each prefix. A request's next step asks for nearly the same ones: those of whole chunks are kept."""
    hashes, num_whole = [1], len(token_ids) - len(token_ids) % CHUNK
    for start in range(0, num_whole, CHUNK):
        hashes += _hashes_of_chunk(hashes[-1], tuple(token_ids[start : start + CHUNK]))
    return hashes[1:] + _hashes(hashes[-1], token_ids[num_whole:])


def next_token(token_ids: list[int], seed: int = 0) -> int:
    """The fake model's only possible continuation."""
    return hash((prefix_hashes(token_ids)[-1], seed)) % VOCAB


def continuation(prompt: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    """The expected output of a request without stop conditions."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


class FakeLLM:
    """Runs steps; drafts `num_drafts` tokens for each request, of which the first `num_right` are right."""

    def __init__(self, scheduler: Scheduler, num_drafts: int = 0, num_right: int = 0, num_ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.num_drafts, self.num_right, self.num_ahead = num_drafts, num_right, num_ahead
        self.flights: list[tuple[ScheduledStep, list[list[int]]]] = []  # computed, not committed
        cache = scheduler.cache
        self._slots = [[(0, 0)] * cache.block_size for _ in range(cache.num_blocks)]
        self._host_slots = [list(self._slots[0]) for _ in range(cache.host.num_blocks if cache.host else 0)]
        self._next_layer: int | None = None  # of a chunk that takes several steps
        self.steps: list[ScheduledStep] = []
        self.emitted: dict[int, list[int]] = {}  # sequence_id -> token ids of its StepOutputs
        self.ended: dict[int, int] = {}  # sequence_id -> number of outputs with a finish_reason

    def step(self) -> list[StepOutput]:
        step = self.scheduler.schedule()
        self.steps.append(step)
        for block, host_block in step.copies.stores:
            self._host_slots[host_block] = list(self._slots[block])
        for block, host_block in step.copies.loads:
            self._slots[block] = list(self._host_slots[host_block])
        if step.layered is not None:
            self._run_layers(step.layered)
        if step.requests:
            self.flights.append((step, [self._run(row) for row in step.rows]))
        outputs: list[StepOutput] = []
        num_kept = self.num_ahead if step.requests else max(0, len(self.flights) - 1)
        while len(self.flights) > num_kept:
            outputs += self._land(*self.flights.pop(0))
        return outputs

    def _land(self, step: ScheduledStep, sampled: list[list[int]]) -> list[StepOutput]:
        drafts = [
            self._draft(request.token_ids + new, request.seed) if new else []
            for request, new in zip(step.requests, sampled)
        ]
        outputs = list(self.scheduler.commit(step, sampled))
        for request, found in zip(step.requests, drafts) if self.num_drafts else ():
            assert not request.num_output_placeholders or not found, "drafts for a request that runs ahead"
            request.draft_token_ids = [] if request.is_finished else found
            request.speculation = request.speculation or Speculation("ngram", self.num_drafts, "exact")
        self.take(outputs)
        return outputs

    def _token_ids(self, request: Request) -> list[int]:
        """Token ids known to the host, then those known only to the fake device."""
        rows = [(other, new) for step, sampled in self.flights for other, new in zip(step.requests, sampled)]
        return request.token_ids + [token for other, new in rows if other is request for token in new]

    def take(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            sequence_id = output.request.sequence_id
            self.emitted.setdefault(sequence_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[sequence_id] = self.ended.get(sequence_id, 0) + 1

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work and not self.flights:
                return num_steps
            self.step()
        raise AssertionError(f"{self.scheduler.num_running} running, {self.scheduler.num_waiting} waiting at the end")

    def _run_layers(self, chunk: LayeredChunk) -> None:
        """Layers in order, without a gap; the last one leaves the chunk's tokens in the cache."""
        request, end, size = chunk.request, chunk.first_token + chunk.num_tokens, self.scheduler.cache.block_size
        assert chunk.first_layer == (0 if self._next_layer is None else self._next_layer)
        self._next_layer = chunk.end_layer
        if request.num_computed_tokens == end:
            hashes, self._next_layer = prefix_hashes(request.token_ids[:end]), None
            for position in range(chunk.first_token, end):
                self._slots[request.block_ids[position // size]][position % size] = (0, hashes[position])

    def _run(self, row: ScheduledRequest) -> list[int]:
        request, size = row.request, self.scheduler.cache.block_size
        known = self._token_ids(request)
        token_ids = known + request.draft_token_ids
        end = row.num_computed_tokens + row.num_scheduled_tokens
        hashes = prefix_hashes(token_ids[:end])
        groups = self.scheduler.cache.groups
        first_seen = max(0, row.num_computed_tokens - groups.num_kept_tokens)
        for group, (table, first) in enumerate(group_tables(request, groups, first_seen)):
            for position in range(row.num_computed_tokens, end):
                self._slots[table[position // size]][position % size] = (group, hashes[position])
            seen = list(chain.from_iterable(map(self._slots.__getitem__, table[first // size : -(-end // size)])))
            lost = f"request {request.sequence_id} lost KV of positions {first} to {end} in group {group}"
            assert seen[first % size :][: end - first] == [(group, one) for one in hashes[first:end]], lost
        assert row.samples == (end >= len(known))
        return self._sample(request, known) if row.samples else []

    def _sample(self, request: Request, token_ids: list[int]) -> list[int]:
        """Greedy verification: the accepted drafts and the token after them."""
        new: list[int] = []
        for draft in [*request.draft_token_ids, -1]:
            new.append(next_token(token_ids, request.seed))
            token_ids.append(new[-1])
            if draft != new[-1]:
                break
        return new

    def _draft(self, token_ids: list[int], seed: int) -> list[int]:
        drafts: list[int] = []
        for index in range(self.num_drafts):
            right = next_token(token_ids + drafts, seed)
            drafts.append(right if index < self.num_right else (right + 1) % VOCAB)
        return drafts


def group_tables(request: Request, groups: KVGroups, first_seen: int) -> list[tuple[list[int], int]]:
    """The block table of each group, and the first position that a step reads."""
    full = [request.block_ids[group :: groups.num_full] for group in range(groups.num_full)]
    windowed = [request.window_block_ids[group :: groups.num_windowed] for group in range(groups.num_windowed)]
    return [(table, 0) for table in full] + [(table, first_seen) for table in windowed]


def make_llm(
    num_blocks: int = 64,
    max_model_len: int = 200,
    caching: bool = True,
    groups: KVGroups = ONE_GROUP,
    attention_parity: float = math.inf,
    num_host_blocks: int = 0,
    most_loads: float = math.inf,
    **config: object,
) -> FakeLLM:
    cache = KVCacheManager(num_blocks, SIZE, caching, num_host_blocks, groups, most_loads=most_loads)
    scheduling = SchedulerConfig(**config)  # type: ignore[arg-type]
    budget = PrefillBudget.of(scheduling, attention_parity)
    return FakeLLM(Scheduler(scheduling, cache, max_model_len, prefill_budget=budget))


def make_request(prompt: list[int] | int, max_tokens: int = 8, priority: int = 0, **params: object) -> Request:
    """prompt: token ids, or a length: such prompts of different lengths share no prefix."""
    token_ids = [prompt] * prompt if isinstance(prompt, int) else prompt
    return Request(token_ids, SamplingParams(max_tokens=max_tokens, **params), priority=priority)  # type: ignore[arg-type]


def check_blocks(scheduler: Scheduler) -> None:
    """Assert that the reference counts are exactly those of the live requests."""
    cache: KVCacheManager = scheduler.cache
    cache.pool.check()
    counts = [0] * cache.num_blocks
    for request in scheduler.live_requests:
        held = request.block_ids + ([] if cache.windows is None else cache.windows.held(request))
        assert len(set(held)) == len(held), "a block is twice in one table"
        assert len(held) <= cache.num_blocks_for(request.stop_conditions.max_slots)
        for block in held:
            counts[block] += 1
    assert counts == [cache.pool.ref_count(block) for block in range(cache.num_blocks)]
    assert cache.leaked_blocks(scheduler.live_requests) == 0
