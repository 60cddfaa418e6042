"""core/kv_groups.py: how layers share blocks, and what a request holds of them."""

from __future__ import annotations

import itertools

import pytest
from fake_llm import FakeLLM, continuation, make_llm, make_request
from slipstream.core.block_pool import BlockPool
from slipstream.core.config import SchedulerConfig
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.kv_events import BlockStored, KVEvent
from slipstream.core.kv_groups import ONE_GROUP, KVGroups, group_layers
from slipstream.core.scheduler import Scheduler
from slipstream.core.window_blocks import WindowBlocks, group_hash

SIZE = 64
GPT_OSS = [128, None] * 12
GEMMA3_12B = ([1024] * 5 + [None]) * 8
GEMMA3_27B = (([1024] * 5 + [None]) * 11)[:62]


def groups_of(windows: list[int | None], num_step: int = 4096) -> KVGroups:
    num_full, num_windowed, of_layers = group_layers(windows)
    return KVGroups(num_full, num_windowed, max(filter(None, windows)) - 1, num_step, of_layers)


@pytest.mark.parametrize(
    ("windows", "num_full", "num_windowed", "num_parts"),
    [
        (GPT_OSS, 1, 1, 12),
        (GEMMA3_12B, 1, 5, 8),
        (GEMMA3_27B, 1, 6, 10),
        ([None, 7, 7, None, 7], 1, 2, 2),
        ([None] * 9 + [7] * 3, 3, 1, 3),
        ([None] * 11 + [7] * 10, 1, 1, 11),
    ],
)
def test_groups_of_published_models(
    windows: list[int | None], num_full: int, num_windowed: int, num_parts: int
) -> None:
    groups = groups_of(windows)
    assert (groups.num_full, groups.num_windowed, groups.num_parts) == (num_full, num_windowed, num_parts)
    kinds = [window is None for window in windows]
    assert [group < num_full for group in groups.of_layers] == kinds
    assert len(set(zip(groups.of_layers, groups.parts))) == len(windows), "two layers share a part of a group's blocks"
    assert sum(len(groups.layers_of(group)) for group in range(groups.num_groups)) == len(windows)


@pytest.mark.parametrize(("windows", "share"), [(GPT_OSS, 0.51), (GEMMA3_12B, 0.18), (GEMMA3_27B, 0.18)])
def test_share_of_the_cache_in_long_contexts(windows: list[int | None], share: float) -> None:
    """gpt-oss keeps half of what all layers would hold, Gemma 3 a fifth."""
    groups, num_tokens = groups_of(windows), 131_072
    held = groups.decode_blocks(num_tokens, SIZE) * groups.num_parts
    everything = num_tokens // SIZE * len(windows)
    assert held <= share * everything


@pytest.mark.parametrize("groups", [ONE_GROUP, KVGroups(1, 1, 5, 7), KVGroups(2, 3, 0, 4), KVGroups(1, 6, 40, 3)])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_the_longest_request_is_the_inverse_of_its_blocks(groups: KVGroups, block_size: int) -> None:
    for num_blocks in range(groups.num_groups, 120):
        longest = groups.max_tokens(num_blocks, block_size)
        assert groups.max_blocks(longest, block_size) <= num_blocks < groups.max_blocks(longest + 1, block_size)
        assert groups.decode_blocks(longest, block_size) <= groups.max_blocks(longest, block_size)


def test_a_window_and_a_step_fit_at_any_offset() -> None:
    for block_size in (1, 4, 8):
        for kept in (0, 1, 5, 8, 17):
            for step in (1, 4, 9):
                groups = KVGroups(1, 1, kept, step)
                most = max(
                    -(-(start + step) // block_size) - groups.first_kept_block(start, block_size)
                    for start in range(100, 140)
                )
                assert most == groups.max_window_blocks(block_size)


@pytest.mark.parametrize("groups", [KVGroups(1, 1, 3, 8), KVGroups(1, 3, 5, 8), KVGroups(2, 1, 0, 8)], ids=str)
def test_prompts_of_any_length_have_their_blocks_in_every_group(groups: KVGroups) -> None:
    """Also those of which one token is left for a step, in a block that windowed groups do not have yet."""
    for length in range(1, 50):
        llm = make_llm(groups=groups, max_num_batched_tokens=8)
        request = make_request(list(range(length)), 6)
        llm.scheduler.add(request)
        llm.run()
        assert request.output_token_ids == continuation(list(range(length)), 6)
        assert llm.scheduler.cache.num_used_blocks == 0


@pytest.mark.parametrize("num_prompt", [30, 58])
@pytest.mark.parametrize("groups", [ONE_GROUP, KVGroups(1, 1, 3, 8), KVGroups(2, 1, 0, 8)], ids=str)
def test_without_preemption_a_request_may_take_the_whole_pool(groups: KVGroups, num_prompt: int) -> None:
    sizes = {"num_blocks": groups.max_blocks(60, 4), "policy": "guaranteed_no_evict"}
    llm = make_llm(groups=groups, max_num_batched_tokens=8, **sizes)
    requests = [make_request([first] * num_prompt, 60 - num_prompt) for first in range(2)]
    for request in requests:
        llm.scheduler.add(request)
    llm.step()
    assert llm.scheduler.num_running == 1
    llm.run()
    assert [request.num_output_tokens for request in requests] == [60 - num_prompt] * 2


@pytest.mark.parametrize("groups", [KVGroups(1, 1, 0, 8), KVGroups(1, 1, 3, 8), KVGroups(2, 2, 8, 8)], ids=str)
def test_a_prefix_is_found_as_far_as_its_last_window_is_whole(groups: KVGroups) -> None:
    """Whichever blocks were evicted, of all windowed groups or of one. A step would read what is in a wrong block."""
    hashes, numbers = [bytes((index,)) for index in range(6)], range(groups.num_full, groups.num_groups)
    for num_known in itertools.product({0, 1, len(numbers)}, repeat=len(hashes)):
        pool = BlockPool(12)
        rows = [tuple(pool.allocate(count) or ()) for count in num_known]
        for row, block_hash in zip(rows, hashes):
            for block, group in zip(row, numbers):
                pool.publish(block, group_hash(block_hash, group))
        firsts = [groups.first_kept_block(4 * end, 4) for end in range(len(hashes) + 1)]
        end = max(end for end, first in enumerate(firsts) if min(num_known[first:end], default=9) >= len(numbers))
        expected = [()] * firsts[end] + rows[firsts[end] : end]
        assert WindowBlocks(pool, groups, 4).find(hashes) == expected, num_known


def test_routers_hear_what_groups_keep_and_give_up() -> None:
    """A block is known by its first group's. One that is gone under another name would be believed in for ever."""
    believed: set[bytes] = set()

    class Router:
        def add(self, event: KVEvent) -> None:
            (believed.add if isinstance(event, BlockStored) else believed.discard)(event.block_hash)  # type: ignore[union-attr]

    cache = KVCacheManager(40, 4, groups=KVGroups(1, 1, 3, 8), events=Router())
    llm = FakeLLM(Scheduler(SchedulerConfig(max_num_batched_tokens=8), cache, 100))
    for first in range(1, 12):
        llm.scheduler.add(make_request([first] * 30, 4))
        llm.run()
    assert 0 < len(believed) < 11 * 7 and all(cache.pool.find(block_hash) is not None for block_hash in believed)
