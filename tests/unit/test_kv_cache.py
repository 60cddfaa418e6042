"""core/kv_cache.py: hash chains, sharing of prefixes, growth and the accounting of leaks."""

from __future__ import annotations

import random

import pytest
from slipstream.core.block_pool import BlockPool
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.prefix import hash_block, hash_root
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams

SIZE = 4


def make_request(prompt: list[int], prefix_key: bytes = b"", **params: object) -> Request:
    return Request(prompt_token_ids=prompt, params=SamplingParams(**params), prefix_key=prefix_key)  # type: ignore[arg-type]


def compute(cache: KVCacheManager, request: Request) -> None:
    """Do as a scheduler does for a prompt in one step, less the sampled token."""
    prefix = cache.find_prefix(request)
    assert cache.can_admit(request, prefix)
    cache.admit(request, prefix)
    request.num_computed_tokens = request.num_tokens
    cache.commit(request)


def match_prefix(cache: KVCacheManager, request: Request) -> int:
    """The number of tokens that `admit` shares, without blocks for the others."""
    return cache._share(request, cache.find_prefix(request))


def test_hashes_are_stable_and_chained() -> None:
    root = hash_root(b"")
    assert hash_block(root, [1, 2]).hex() == hash_block(hash_root(b""), (1, 2)).hex()
    assert hash_block(root, [1, 2]) != hash_block(hash_root(b"adapter"), [1, 2])
    assert hash_block(hash_block(root, [1]), [2]) != hash_block(hash_block(root, [2]), [2])
    assert hash_root(b"").hex() == "eab18137ca5fc7655e80564cc577a01f"


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_only_full_blocks_are_shared_and_the_last_token_never(num_tokens: int, num_shared: int) -> None:
    cache = KVCacheManager(16, SIZE)
    prompt = list(range(12))
    compute(cache, make_request(prompt))
    request = make_request(prompt[:num_tokens])
    assert match_prefix(cache, request) == num_shared == request.num_computed_tokens == request.num_cached_tokens
    assert request.num_reused_blocks == len(request.block_ids) == num_shared // SIZE


def test_match_ends_at_the_first_different_block() -> None:
    cache = KVCacheManager(16, SIZE)
    first = make_request(list(range(16)))
    compute(cache, first)
    second = make_request([*range(4), 99, *range(5, 16)])
    assert match_prefix(cache, second) == 4 and second.block_ids == first.block_ids[:1]
    assert (cache.num_prefix_queries, cache.num_prefix_hits) == (32, 4)


def test_freed_content_is_found_until_evicted() -> None:
    cache = KVCacheManager(4, SIZE)
    first = make_request(list(range(12)))
    compute(cache, first)
    cache.free(first)
    assert cache.num_used_blocks == 0
    again = make_request(list(range(12)))
    assert match_prefix(cache, again) == 8
    cache.free(again)
    compute(cache, make_request(list(range(100, 112))))  # needs three of four blocks
    assert match_prefix(cache, make_request(list(range(12)))) == 4


@pytest.mark.parametrize("reason", ["off", "key", "prompt_logprobs"])
def test_no_sharing_where_it_would_be_wrong(reason: str) -> None:
    cache = KVCacheManager(16, SIZE, enable_prefix_caching=reason != "off")
    prompt = list(range(12))
    compute(cache, make_request(prompt))
    key = b"tenant" if reason == "key" else b""
    params = {"prompt_logprobs": 0} if reason == "prompt_logprobs" else {}
    request = make_request(prompt, key, **params)
    assert match_prefix(cache, request) == 0
    if reason == "prompt_logprobs":  # they have left with the first token: whoever resumes computes nothing again
        request.token_ids.append(1)
        assert match_prefix(cache, request) == 12


def test_allocate_grows_to_the_asked_length_or_changes_nothing() -> None:
    cache = KVCacheManager(3, SIZE)
    request = make_request([1] * 5)
    assert cache.allocate(request, 5) and len(request.block_ids) == 2
    assert cache.allocate(request, 8) and len(request.block_ids) == 2
    held = list(request.block_ids)
    assert not cache.allocate(request, 13)
    assert request.block_ids == held and cache.num_free_blocks == 1
    assert cache.allocate(request, 12) and cache.num_free_blocks == 0
    assert request.num_new_blocks == 3


def test_free_is_harmless_twice_and_leaks_are_counted() -> None:
    cache = KVCacheManager(8, SIZE)
    kept, lost = make_request([1] * 6), make_request([2] * 9)
    compute(cache, kept)
    compute(cache, lost)
    assert cache.leaked_blocks([kept, lost]) == 0
    assert cache.leaked_blocks([kept]) == 3
    cache.free(lost)
    cache.free(lost)
    assert cache.leaked_blocks([kept]) == 0


def test_can_admit_does_not_count_a_cached_block_as_free_and_as_shared() -> None:
    cache = KVCacheManager(3, SIZE)
    first = make_request(list(range(9)))
    compute(cache, first)
    cache.free(first)
    longer = make_request(list(range(13)))  # four blocks: two cached, two more; but two cached and one empty exist
    prefix = cache.find_prefix(longer)
    assert len(prefix) == 2 and cache.num_free_blocks == 3
    assert not cache.can_admit(longer, prefix)
    assert cache.can_admit(make_request(list(range(12))), prefix)


def test_generated_tokens_are_published_too() -> None:
    cache = KVCacheManager(8, SIZE)
    first = make_request([1, 2, 3])
    compute(cache, first)
    first.token_ids += [4, 5, 6]
    assert cache.allocate(first, 6)
    first.num_computed_tokens = 5
    cache.commit(first)
    assert match_prefix(cache, make_request([1, 2, 3, 4, 9])) == 4


def test_a_generated_block_is_found_only_after_its_own_prefix() -> None:
    cache = KVCacheManager(8, SIZE)
    first = make_request([1, 1, 1, 1])
    compute(cache, first)
    first.token_ids += [7, 7, 7, 7, 7]
    assert cache.allocate(first, 9)
    first.num_computed_tokens = 8
    cache.commit(first)
    assert match_prefix(cache, make_request([1, 1, 1, 1, 7, 7, 7, 7, 5])) == 8
    assert match_prefix(cache, make_request([7, 7, 7, 7, 5])) == 0


def test_a_salt_parts_the_device_the_host_and_what_is_being_computed() -> None:
    """Whoever guesses another's prompt must neither find its blocks nor be made to wait for them."""
    cache = KVCacheManager(4, SIZE, num_host_blocks=8)
    prompt = list(range(12))
    mine = make_request(prompt, b"mine")
    cache.admit(mine, cache.find_prefix(mine))
    guess, again = make_request(prompt, b"other"), make_request(prompt, b"mine")
    assert [len(cache.find_prefix(request)) for request in (guess, again)] == [0, 0]
    assert [cache.is_prefix_underway(request, 0) for request in (guess, again)] == [False, True]
    mine.num_computed_tokens = 12
    cache.commit(mine)
    assert [len(cache.find_prefix(request)) for request in (guess, again)] == [0, 2]
    cache.free(mine)
    compute(cache, make_request(list(range(100, 116))))  # takes all blocks: what they held goes to host memory
    found = [cache.find_prefix(make_request(prompt, key)) for key in (b"other", b"mine", b"")]
    assert [len(prefix) for prefix in found] == [0, 2, 0] and found[1].num_hosted == 2


def test_blocks_that_a_request_had_are_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that waits for blocks is looked for in every step, and each beam of a search in each of its steps."""
    looked_up: list[bytes] = []

    def count(pool: BlockPool, block_hash: bytes) -> int | None:
        looked_up.append(block_hash)
        return find(pool, block_hash)

    find = BlockPool.find
    monkeypatch.setattr(BlockPool, "find", count)
    cache, prompt = KVCacheManager(8, SIZE), list(range(4 * SIZE + 1))
    first = make_request(prompt)
    compute(cache, first)
    cache.free(first)
    looked_up.clear()
    again = make_request(prompt)
    assert [len(cache.find_prefix(again)) for _ in range(5)] == [4] * 5 and len(looked_up) == 4

    other = make_request([9] * (6 * SIZE))  # takes blocks of the end of the prompt
    compute(cache, other)
    assert len(cache.find_prefix(again)) == 2
    cache.free(other)
    compute(cache, again)
    cache.free(again)
    child = make_request([*prompt, 7])
    child.guessed_blocks = again.guessed_blocks
    assert cache.find_prefix(child).blocks == again.guessed_blocks[:4]


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_guess_changes_nothing(seed: int) -> None:
    dice = random.Random(seed)
    cache = KVCacheManager(12, SIZE)
    for _ in range(100):
        request = make_request([dice.randrange(2) for _ in range(dice.randrange(1, 5 * SIZE))])
        expected = cache.find_prefix(request).blocks
        request.guessed_blocks = expected[: dice.randrange(6)] + [dice.randrange(12) for _ in range(dice.randrange(4))]
        assert cache.find_prefix(request).blocks == expected
        compute(cache, request)
        cache.free(request)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_cached", [True, False])
def test_blocks_of_many_decodes_are_published_as_those_of_each(seed: int, is_cached: bool) -> None:
    """Two caches, one told of all requests at once. Some have the same tokens, no block yet, or more than one."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(2)] * dice.choice([1, 3, 4, 9]) for _ in range(12)]
    caches = [KVCacheManager(400, SIZE, is_cached) for _ in range(2)]
    groups = [[make_request(list(prompt)) for prompt in prompts] for _ in caches]
    for cache, requests in zip(caches, groups):
        for request in requests:
            compute(cache, request)
    for _ in range(30):
        chosen = dice.sample(range(12), 5)
        news = [[dice.randrange(2)] * dice.choice([1, 1, 1, 9]) for _ in chosen]
        for cache, requests in zip(caches, groups):
            decoding = [requests[index] for index in chosen]
            for request, new in zip(decoding, news):
                request.token_ids += new
                assert cache.allocate(request, request.num_tokens)
                request.num_computed_tokens = request.num_tokens - 1
            if cache is caches[0]:
                cache.commit_filled(decoding)
            else:
                for request in decoding:
                    cache.commit(request)
        assert _published(caches[0], groups[0]) == _published(caches[1], groups[1])
        caches[0].pool.check()
    assert any(request.num_published_blocks > 2 for request in groups[0]) is is_cached


def _published(cache: KVCacheManager, requests: list[Request]) -> list[tuple[int, list[bytes], list[int | None]]]:
    return [
        (one.num_published_blocks, one.block_hashes, [cache.pool.find(block_hash) for block_hash in one.block_hashes])
        for one in requests
    ]
