"""Host memory behind the prefix cache: content that the device gives up comes back, and comes back right."""

from __future__ import annotations

import random

import pytest
from slipstream.core.host_cache import BlockCopies, HostCache
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams

SIZE = 4


def make_request(tokens: list[int]) -> Request:
    return Request(list(tokens), SamplingParams())


class Memory:
    """What the blocks really hold, as a step would leave it: copies first, then the computed blocks."""

    def __init__(self, cache: KVCacheManager, num_host_blocks: int) -> None:
        self.cache = cache
        self.device: list[object] = [None] * cache.num_blocks
        self.host: list[object] = [None] * num_host_blocks

    def run(self, requests: list[tuple[Request, int]]) -> None:
        """One step that computes each request's tokens after its cached ones."""
        copies = self.cache.take_copies()
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
    assert not cache.take_copies()


def test_a_full_host_gives_up_its_oldest_content_but_nothing_that_is_being_loaded() -> None:
    host = HostCache(2)
    host.store(b"a", 0)
    host.store(b"b", 1)
    block = host.reserve(b"a")
    host.store(b"c", 2)  # b gives way, though a is... not older: reserve has used it
    assert host.find(b"b") is None and host.find(b"a") == block
    host.reserve(b"c")
    host.store(b"d", 3)  # both are being loaded: d is lost
    assert host.find(b"d") is None
    host.load(block, 7)
    assert host.take_copies() == BlockCopies([(0, 0), (1, 1), (2, 1)], [(7, block)])
    host.store(b"d", 3)
    assert host.find(b"d") is not None
    host.check()


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
