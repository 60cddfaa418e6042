"""Host memory behind the prefix cache: content that the device gives up comes back, and comes back right."""

from __future__ import annotations

import math
import random
import time
from unittest.mock import Mock

import pytest
from fake_llm import FakeLLM, continuation, make_llm, make_request
from slipstream.core.host_cache import BlockCopies, HostCache
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.kv_events import HOST, BlockRemoved, BlockStored, KVEvent
from slipstream.core.layered_prefill import LayeredChunk
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.stats import Metric, Stats
from slipstream.core.step import ScheduledRequest, ScheduledStep

SIZE = 4


def step_of(requests: list[tuple[Request, int]]) -> ScheduledStep:
    """One that computes each request's tokens after its cached ones."""
    return ScheduledStep.of([ScheduledRequest(one, cached, one.num_tokens - cached, True) for one, cached in requests])


class Memory:
    """What the blocks really hold, as a step would leave it: copies first, then the computed blocks."""

    def __init__(self, cache: KVCacheManager, num_host_blocks: int) -> None:
        self.cache = cache
        self.device: list[object] = [None] * cache.num_blocks
        self.host: list[object] = [None] * num_host_blocks

    def run(self, requests: list[tuple[Request, int]]) -> None:
        """One step that computes each request's tokens after its cached ones."""
        copies = self.cache.take_copies(step_of(requests))
        for block, host_block in copies.stores:
            self.host[host_block] = self.device[block]
        for block, host_block in copies.loads:
            self.device[block] = self.host[host_block]
        for request, num_cached in requests:
            for index, block in enumerate(request.block_ids):
                content = tuple(request.token_ids[: (index + 1) * SIZE])
                if index * SIZE >= num_cached:
                    self.device[block] = content
                assert self.device[block] == content, "a cached block holds something else"

    def serve(self, tokens: list[int]) -> int:
        """Admit a request, run it in a step of its own, let it go. Returns its number of cached tokens."""
        request = make_request(tokens)
        prefix = self.cache.find_prefix(request)
        assert self.cache.can_admit(request, prefix)
        num_cached = self.cache.admit(request, prefix)
        self.run([(request, num_cached)])
        request.num_computed_tokens = request.num_tokens
        self.cache.commit(request)
        self.cache.free(request)
        return num_cached


def test_what_the_device_gave_up_comes_back() -> None:
    cache = KVCacheManager(4, SIZE, num_host_blocks=8)
    memory = Memory(cache, 8)
    cold, other = list(range(13)), list(range(100, 113))
    assert memory.serve(cold) == 0
    assert memory.serve(other) == 0  # takes all four blocks
    assert memory.serve(cold) == 12
    assert cache.host is not None and cache.host.num_loaded == 3 and cache.host.num_stored >= 3


def test_without_host_blocks_it_is_computed_again() -> None:
    cache = KVCacheManager(4, SIZE)
    memory = Memory(cache, 0)
    for _ in range(2):
        assert memory.serve(list(range(13))) == 0
        assert memory.serve(list(range(100, 113))) == 0
    assert not cache.take_copies(ScheduledStep())


@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_waits_finds_what_a_new_one_would(seed: int) -> None:
    """It keeps where its prefix was; blocks in host memory come back anywhere, also to the last block of the pool."""
    dice = random.Random(seed)
    memory = Memory(KVCacheManager(6, SIZE, num_host_blocks=12), 12)
    prompts = [[first, *range(length)] for first, length in ((1, 8), (2, 14), (3, 17), (4, 8))]
    waiting = [make_request(prompt) for prompt in prompts]
    for _ in range(60):
        for request, prompt in zip(waiting, prompts):
            assert memory.cache.find_prefix(request) == memory.cache.find_prefix(make_request(prompt))
        memory.serve(dice.choice(prompts))


def test_a_full_host_gives_up_its_oldest_content_but_nothing_that_is_being_loaded() -> None:
    host = HostCache(2)
    host.store(b"a", 0)
    host.store(b"b", 1)
    first = host.reserve(b"a")
    host.load(first, 7)
    host.store(b"c", 2)  # b gives way: a is older, but being loaded
    assert host.find(b"b") is None and host.find(b"a") == first
    second = host.reserve(b"c")
    host.load(second, 8)
    host.store(b"d", 3)  # both are being loaded: d is lost
    assert host.find(b"d") is None
    host.allow_more(2)
    # of b nothing is stored any more; what is loaded was not in host memory yet
    assert host.take_copies([0, 1, 3]) == BlockCopies([(0, first), (2, second)], [(7, first), (8, second)])
    host.store(b"d", 3)
    assert host.find(b"d") is not None and host.find(b"a") is None
    host.check()


def test_content_that_the_device_gives_up_again_counts_as_used_again() -> None:
    host = HostCache(2)
    for device_block, content in enumerate((b"a", b"b", b"a", b"c")):
        host.store(content, device_block)
    assert host.find(b"a") is not None and host.find(b"b") is None


def test_loads_that_may_be_made_are_not_counted_again() -> None:
    host = HostCache(4)
    for block in range(4):
        host.store(bytes([block]), block)
        host.load(host.reserve(bytes([block])), 10 + block)
    host.allow_to(2)
    assert host.allow_more(1) == 1
    assert [host.may_load(number) for number in range(1, 5)] == [True, True, True, False]
    assert host.allow_more(math.inf) == 1 and host.may_load(4)


def test_copies_are_counted_once_however_often_somebody_looks() -> None:
    host, stats = HostCache(4), Stats()
    for block in range(3):
        host.store(bytes([block]), block)
    host.load(host.reserve(b"\x00"), 9)
    host.allow_more(1)
    host.take_copies([1])
    for _ in range(2):
        host.record(stats)
    stats.publish()
    told = dict(stats.drain())
    assert (told[Metric.KV_BLOCKS_STORED], told[Metric.KV_BLOCKS_LOADED]) == ([2], [1])
    assert (told[Metric.KV_HOST_BLOCKS_USED], told[Metric.KV_HOST_BLOCKS_TOTAL]) == ([3], [4])


def test_routers_hear_what_host_memory_keeps_and_gives_up() -> None:
    told: list[KVEvent] = []
    host = HostCache(1, Mock(add=told.append))
    host.store(b"a", 0)
    host.store(b"a", 3)  # it is there
    host.store(b"b", 1)
    stored = [BlockStored(name, None, (), HOST) for name in (b"a", b"b")]
    assert told == [stored[0], BlockRemoved(b"a", HOST), stored[1]]


def test_what_is_evicted_is_stored_when_its_block_is_written() -> None:
    host = HostCache(8)
    for block in range(5):
        host.store(bytes([block]), block)
    assert host.num_used_blocks == 5 and host.num_stored == 0
    assert [block for block, _ in host.take_copies([1, 6, 3]).stores] == [1, 3]
    assert not host.take_copies([1, 3]) and host.awaits_store([9, 4]) and not host.awaits_store([1, 3])
    # its content has not come when it is evicted again, so there is nothing to store
    host.load(host.reserve(b"\x01"), 9)
    host.store(b"\x01", 9)
    assert not host.take_copies([9]) and not host.has_loads
    host.check()


def test_a_full_host_in_use_costs_nothing_to_look_through() -> None:
    """Twenty thousand evictions beside ten thousand blocks that loads read."""
    host = HostCache(20_000)
    for block in range(20_000):
        host.store(block.to_bytes(4, "big"), block)
    for block in range(10_000):
        host.load(host.reserve(block.to_bytes(4, "big")), 20_000 + block)
    start = time.thread_time()
    for block in range(20_000, 40_000):
        host.store(block.to_bytes(4, "big"), 10_000 + block)
    assert time.thread_time() - start < 1.0, "looking through the blocks that are read takes 4 s"
    assert host.num_used_blocks == 20_000


def decode_and_prompts(most_loads: float) -> tuple[FakeLLM, list[Request]]:
    """A stream beside two prompts whose prefixes of 12 and 10 blocks are in host memory."""
    llm = make_llm(40, num_host_blocks=100, most_loads=most_loads, max_num_batched_tokens=100)
    prompts = [[first, *range(length)] for first, length in ((500, 48), (600, 40))]
    for prompt in [*prompts, list(range(200, 355))]:  # the last one pushes the others out
        llm.scheduler.add(make_request(prompt, 1))
        llm.run()
    stream = make_request([7] * 5, 60)
    llm.scheduler.add(stream)
    llm.step()
    requests = [make_request(prompt, 4) for prompt in prompts]
    for request in requests:
        llm.scheduler.add(request)
    return llm, [stream, *requests]


@pytest.mark.parametrize("most_loads", [1, 3, math.inf])
def test_streams_do_not_wait_for_more_loads_than_a_step_may_make(most_loads: float) -> None:
    """Their tokens come in every step, and prefixes in the order of their requests."""
    llm, (stream, first, second) = decode_and_prompts(most_loads)
    for _ in range(30):
        llm.step()
        assert stream in llm.steps[-1].requests
    steps = llm.steps[-30:]
    loads = [len(step.copies.loads) for step in steps]
    assert sum(loads) == 22 and max(loads) == min(most_loads, 22)
    began = [next(number for number, step in enumerate(steps) if one in step.requests) for one in (first, second)]
    assert began == [math.ceil(num_blocks / most_loads) - 1 if most_loads < math.inf else 0 for num_blocks in (12, 22)]
    for one in (first, second):
        assert one.output_token_ids == continuation(one.prompt_token_ids, 4)
        assert one.num_cached_tokens == one.num_prompt_tokens - 1


@pytest.mark.parametrize("is_special", [True, False], ids=["that begins while they wait", "that they come to"])
def test_a_run_of_decodes_goes_on_beside_requests_that_wait_for_loads(is_special: bool) -> None:
    """They join it when theirs have come, one as a decode and one with a prompt's rest."""
    llm = make_llm(40, num_host_blocks=100, most_loads=1, max_num_batched_tokens=100)
    prompts = [[first, *range(length)] for first, length in ((500, 48), (600, 42))]
    for prompt in [*prompts, list(range(200, 355))]:
        llm.scheduler.add(make_request(prompt, 1))
        llm.run()
    stream, special = make_request([7] * 5, 60), make_request([8] * 5, 4)
    if is_special:  # no run before it ends
        special = Request([8] * 5, SamplingParams(max_tokens=4, stop_words_ids=((2000, 2001),)))
    requests = [make_request(prompt, 12) for prompt in prompts]
    for request in (stream, special):
        llm.scheduler.add(request)
    llm.step()
    for request in requests:
        llm.scheduler.add(request)
    num_steps = len(llm.steps)
    for _ in range(24):
        llm.step()
    runs = [step.run is not None for step in llm.steps[num_steps:]]
    assert runs == ([False] * 4 + [True] * 20 if is_special else [False] + [True] * 23)
    began = [llm.steps[num_steps + index].requests for index in (4, 11, 21)]
    assert began == [[stream], [stream, requests[0]], [stream, *requests]]
    llm.run()
    for one in requests:
        assert one.output_token_ids == continuation(one.prompt_token_ids, 12)


def test_who_needs_no_load_does_not_wait_for_those_of_others() -> None:
    llm, (_, *prompts) = decode_and_prompts(most_loads=1)
    llm.step()
    plain = make_request([900] * 5, 2)
    llm.scheduler.add(plain)
    llm.step()
    assert plain.num_output_tokens == 1 and all(request.awaits_loads for request in prompts)


@pytest.mark.parametrize("most_loads", [11, 12])
def test_a_prefix_that_a_step_may_load_starts_with_it(most_loads: int) -> None:
    llm, (_, first, second) = decode_and_prompts(most_loads)
    llm.step()
    assert first.num_output_tokens == (most_loads == 12) and second.awaits_loads


def test_a_request_that_loses_its_blocks_while_they_are_loaded_comes_back() -> None:
    llm = make_llm(16, num_host_blocks=100, most_loads=1, max_num_batched_tokens=100)
    prompt = [500, *range(48)]
    for text in (prompt, list(range(200, 262))):  # the second one pushes the first out
        llm.scheduler.add(make_request(text, 1))
        llm.run()
    stream, loading = make_request([7] * 5, 40), make_request(prompt, 4)
    llm.scheduler.add(stream)
    llm.step()
    llm.scheduler.add(loading)
    llm.step()
    assert loading.awaits_loads
    while not loading.num_preemptions:
        llm.step()
    assert not loading.num_output_tokens
    llm.run()
    assert loading.output_token_ids == continuation(prompt, 4)


def test_nobody_else_keeps_a_prefix_waiting() -> None:
    llm, (stream, first, second) = decode_and_prompts(2)
    llm.step()
    assert first.awaits_loads and second.awaits_loads
    llm.take([output for output in [llm.scheduler.finish(stream, FinishReason.CANCELLED)] if output])
    llm.step()
    assert not first.awaits_loads and first.num_output_tokens == 1 and second.awaits_loads
    llm.step()  # beside a stream again
    assert len(llm.steps[-1].copies.loads) <= 2
    llm.run()
    assert second.output_token_ids == continuation(second.prompt_token_ids, 4)


def test_a_request_that_shares_what_is_on_its_way_waits_for_it_too() -> None:
    llm, (_, first, _) = decode_and_prompts(2)
    llm.step()
    other = make_request([*first.prompt_token_ids, 1, 2, 3], 4)
    llm.scheduler.add(other, now=0.0)
    llm.step()
    assert other.num_cached_tokens == 48 and other.awaits_loads
    output = llm.scheduler.finish(first, FinishReason.CANCELLED)  # what it has queued still comes
    assert output is not None
    llm.run()
    assert other.output_token_ids == continuation(other.prompt_token_ids, 4)


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_never_reads_a_wrong_block(seed: int) -> None:
    dice = random.Random(seed)
    num_blocks, num_host_blocks = dice.randrange(6, 14), dice.randrange(1, 20)
    cache = KVCacheManager(num_blocks, SIZE, num_host_blocks=num_host_blocks)
    memory = Memory(cache, num_host_blocks)
    texts = [[dice.randrange(1000) for _ in range(dice.randrange(1, 21))] for _ in range(6)]
    texts += [text[: dice.randrange(1, len(text) + 1)] + [dice.randrange(1000)] * 3 for text in texts]
    num_cached = 0
    for _ in range(200):
        step: list[tuple[Request, int]] = []
        for tokens in dice.choices(texts, k=dice.randrange(1, 4)):  # several are admitted before anything is copied
            request = make_request(tokens)
            prefix = cache.find_prefix(request)
            if cache.can_admit(request, prefix) and not cache.is_prefix_underway(request, len(prefix)):
                step.append((request, cache.admit(request, prefix)))
        memory.run(step)
        for request, cached in step:
            num_cached += cached
            request.num_computed_tokens = request.num_tokens
            cache.commit(request)
        for request, _ in step:
            cache.free(request)
        cache.pool.check()
        assert cache.host is not None
        cache.host.check()
        assert cache.num_used_blocks == 0
    assert num_cached > 0


def test_a_chunk_that_goes_through_the_layers_by_itself_writes_its_blocks() -> None:
    request = make_request(20)
    request.block_ids = [3, 1, 4, 5, 9]
    step = ScheduledStep(layered=LayeredChunk(request, first_token=4, num_tokens=6, first_layer=0, end_layer=1))
    assert list(step.written_blocks(SIZE)) == [1, 4]
