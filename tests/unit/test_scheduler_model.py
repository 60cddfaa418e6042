"""Block pool and scheduler against a model: random requests, cancels, time-outs and steps, every invariant after each.

The fake model (tests/support/fake_llm.py) compares every KV slot with the request's own tokens before it samples, and
its text depends on the tokens alone, so one comparison with the text of a lonely request covers preempted = not, prefix
hit = miss, chunked = whole, batch = single, speculation = plain and scheduled ahead = one step after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fake_llm import FakeLLM, check_blocks, continuation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slipstream.core.config import SCHEDULER_POLICIES, SchedulerConfig
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.kv_groups import KVGroups
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler
from slipstream.core.stats import METRICS, Metric, MetricKind

MAX_MODEL_LEN = 40
COMMON_PROMPT = list(range(100, 130))
OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True)
class Setting:
    """One way to configure the scheduler and the fake model's speculation."""

    policy: str
    num_blocks: int
    block_size: int
    budget: int
    max_num_seqs: int
    is_chunked: bool
    is_caching: bool
    num_drafts: int
    num_right: int
    num_ahead: int
    num_microbatches: int
    kinds: tuple[int, int, int] = (1, 0, 0)  # full groups, windowed groups, tokens that these keep
    num_host_blocks: int = 0
    most_loads: float = math.inf


SETTINGS = st.builds(
    Setting,
    policy=st.sampled_from(SCHEDULER_POLICIES),
    num_blocks=st.integers(6, 24),
    block_size=st.sampled_from([2, 4, 8]),
    budget=st.integers(3, 30),
    max_num_seqs=st.integers(1, 6),
    is_chunked=st.booleans(),
    is_caching=st.booleans(),
    num_drafts=st.sampled_from([0, 0, 3]),
    num_right=st.integers(0, 3),
    num_ahead=st.integers(0, 1),
    num_microbatches=st.sampled_from([1, 1, 2, 3, 4]),
    kinds=st.just((1, 0, 0)),
)
GROUPED_SETTINGS = st.builds(
    replace,
    SETTINGS,
    num_blocks=st.integers(12, 60),
    kinds=st.sampled_from([(1, 1, 0), (1, 1, 3), (1, 1, 8), (1, 3, 5), (2, 1, 4)]),
)
HOSTED_SETTINGS = st.builds(
    replace,
    SETTINGS,
    is_caching=st.just(True),
    num_host_blocks=st.integers(1, 60),
    most_loads=st.sampled_from([1, 2, 5, math.inf]),
)
# a piece of the common prompt, perhaps with a tail of its own: many prefixes are shared, some to the last token
PROMPTS = st.builds(
    lambda length, tail: COMMON_PROMPT[:length] + tail,
    st.integers(1, 28),
    st.lists(st.integers(0, 2), max_size=4),
)


def expected_output(request: Request) -> list[int]:
    """The text of that request alone in the world, by a second statement of the stop conditions."""
    params = request.params
    room = min(params.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens)
    text = continuation(request.prompt_token_ids, room, request.seed)
    for count in range(max(1, params.min_tokens), room + 1):
        if text[count - 1] in request.eos_token_ids:
            return text[:count]
    return text


class SchedulerWalk(RuleBasedStateMachine):
    @initialize(setting=SETTINGS)
    def start(self, setting: Setting) -> None:
        self.start_with(setting)

    def start_with(self, setting: Setting) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=setting.budget,
            max_num_seqs=setting.max_num_seqs,
            policy=setting.policy,
            max_waiting_requests=8,
            enable_chunked_prefill=setting.is_chunked,
        )
        groups = KVGroups(*setting.kinds, max_step_tokens=min(setting.budget, MAX_MODEL_LEN))
        sizes = setting.num_blocks, setting.block_size
        most_loads = setting.most_loads if setting.is_chunked else math.inf
        cache = KVCacheManager(*sizes, setting.is_caching, setting.num_host_blocks, groups, most_loads=most_loads)
        self.config = config
        self.scheduler = Scheduler(config, cache, MAX_MODEL_LEN)
        num_drafts = setting.num_drafts if setting.num_microbatches == 1 else 0
        num_ahead = 0 if num_drafts else setting.num_ahead  # drafts wait for the tokens before them
        if setting.num_microbatches > 1:
            self.scheduler.num_microbatches, num_ahead = setting.num_microbatches, setting.num_microbatches - 1
        self.llm = FakeLLM(self.scheduler, num_drafts, setting.num_right, num_ahead)
        self.requests: list[Request] = []
        self.counters = [0.0] * len(METRICS)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 20),
        num_eos=st.sampled_from([0, 0, 100, 400]),
        priority=st.integers(-1, 1),
        seed=st.integers(0, 1),
        num_siblings=st.sampled_from([1, 1, 1, 2, 3]),
        bad_words=st.sampled_from([(), (), ((1, 2),)]),  # the fake model ignores them; the scheduler may not run ahead
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        num_eos: int,
        priority: int,
        seed: int,
        num_siblings: int,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), bad_words_ids=bad_words)
        self.add_group(
            [
                Request(prompt, params, seed + index, priority, eos_token_ids=frozenset(range(num_eos)))
                for index in range(num_siblings)
            ]
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), max_tokens=st.integers(1, 10))
    def add_next_turn(self, data: st.DataObject, max_tokens: int) -> None:
        """A prompt that goes on from what another request has got so far: blocks of generated tokens are shared too."""
        earlier = data.draw(st.sampled_from(self.requests))
        prompt = [*earlier.token_ids[: MAX_MODEL_LEN - 5], 3]
        self.add_group([Request(prompt, SamplingParams(max_tokens=max_tokens), earlier.seed)])

    def add_group(self, group: list[Request]) -> None:
        num_before = self.scheduler.num_waiting
        try:
            self.scheduler.add_all(group)
        except (CapacityError, RequestError):
            assert self.scheduler.num_waiting == num_before
        else:
            self.requests += group

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            had_work = self.scheduler.has_work and not self.llm.flights
            self.llm.step()
            self.check_step(had_work)

    def check_step(self, had_work: bool) -> None:
        step = self.llm.steps[-1]
        num_tokens = step.num_scheduled_tokens
        assert sum(num_tokens) == step.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len({request.sequence_id for request in step.requests}) == len(num_tokens) <= self.config.max_num_seqs
        assert all(count > 0 for count in num_tokens)
        assert bool(step.requests) or not had_work, "a step without rows although there is work"
        assert len(self.llm.flights) <= self.llm.num_ahead
        assert step.requests or not self.llm.flights or self.llm.num_ahead > 1
        assert not (step.preempted and self.config.policy == "guaranteed_no_evict")

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.ERROR]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        request = data.draw(st.sampled_from(list(self.scheduler.live_requests)))
        output = self.scheduler.finish(request, reason)
        assert output is not None and request.is_finished
        self.llm.take([output])
        assert self.scheduler.finish(request, FinishReason.STOP) is None and request.finish_reason is reason

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        late = data.draw(st.sampled_from(list(self.scheduler.live_requests)))
        late.deadline = 5.0
        self.scheduler.expiries.add(late)  # as `add` does
        outputs = self.scheduler.expire(6.0)
        assert [output.request for output in outputs] == [late]
        self.llm.take(outputs)

    @invariant()
    def check_state(self) -> None:
        check_blocks(self.scheduler)
        if self.scheduler.cache.host is not None:
            self.scheduler.cache.host.check()
        live = list(self.scheduler.live_requests)
        assert sorted(r.sequence_id for r in live) == [r.sequence_id for r in self.requests if not r.is_finished]
        assert self.scheduler.num_running <= self.config.max_num_seqs
        for request in self.requests:
            num_tokens = request.num_tokens + request.num_output_placeholders
            assert request.is_finished or request.num_computed_tokens < num_tokens
            assert request.is_finished or request.num_output_placeholders <= self.llm.num_ahead
            text = expected_output(request)
            assert (
                request.output_token_ids
                == self.llm.emitted.get(request.sequence_id, [])
                == text[: len(request.output_token_ids)]
            )

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # no request is computed more often than all others preempt it, so this is far above what fairness allows
        self.llm.run(max_steps=2000)
        check_blocks(self.scheduler)
        assert self.scheduler.cache.num_used_blocks == 0 and not self.scheduler.cache._computing
        for request in self.requests:
            assert self.llm.ended[request.sequence_id] == 1, "not exactly one end"
            if request.finish_reason in OWN_ENDS:
                assert request.output_token_ids == expected_output(request)
        self.check_counters()

    def check_counters(self) -> None:
        self.scheduler.stats.publish()
        for index, values in self.scheduler.stats.drain():
            if METRICS[index].kind is MetricKind.COUNTER:
                self.counters[index] += values[0]
        ended = [self.counters[metric] for metric in Metric if metric.name.startswith("FINISHED_")]
        assert sum(ended) == len(self.requests)
        assert self.counters[Metric.GENERATION_TOKENS] == sum(map(len, self.llm.emitted.values()))
        assert self.counters[Metric.PREEMPTIONS] == sum(request.num_preemptions for request in self.requests)
        assert self.counters[Metric.ACCEPTED_TOKENS] == sum(request.num_accepted_tokens for request in self.requests)


class GroupedWalk(SchedulerWalk):
    """The same with full and windowed KV groups."""

    @initialize(setting=GROUPED_SETTINGS)
    def start(self, setting: Setting) -> None:
        self.start_with(setting)


class HostedWalk(SchedulerWalk):
    """The same with host memory behind the pool, of which a step with other requests may load a few blocks."""

    @initialize(setting=HOSTED_SETTINGS)
    def start(self, setting: Setting) -> None:
        self.start_with(setting)

    def check_step(self, had_work: bool) -> None:
        super().check_step(had_work)
        step = self.llm.steps[-1]
        targets = [block for block, _ in step.copies.loads]
        assert len(set(targets)) == len(targets), "two loads to one block"
        host_blocks = [block for _, block in step.copies.stores]
        assert len(set(host_blocks)) == len(host_blocks), "two stores to one block"
        held = {request.sequence_id for request in step.requests if request.awaits_loads}
        assert not held, "a request computes before its prefix has come"


TestSchedulerWalk = SchedulerWalk.TestCase
TestSchedulerWalk.settings = settings(max_examples=150, stateful_step_count=40)
TestGroupedWalk = GroupedWalk.TestCase
TestGroupedWalk.settings = settings(max_examples=150, stateful_step_count=40)
TestHostedWalk = HostedWalk.TestCase
TestHostedWalk.settings = settings(max_examples=150, stateful_step_count=40)
