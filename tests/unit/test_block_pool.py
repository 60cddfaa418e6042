"""core/block_pool.py: references, eviction order, and that misuse is noticed."""

from __future__ import annotations

import pytest
from slipstream.core.block_pool import BlockPool


def test_allocate_hands_out_each_block_once_and_refuses_without_change() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert (pool.num_used_blocks, pool.num_free_blocks) == (3, 1)
    assert pool.allocate(1) == [3]
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or []
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used_blocks == 1 and pool.ref_count(blocks[0]) == 1
    pool.release(blocks)
    assert pool.num_used_blocks == 0
    pool.check()


def test_double_free_is_an_assertion() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


def test_empty_blocks_go_before_cached_ones_and_cached_ones_by_least_recent_use() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1) or [], pool.allocate(1) or []
    pool.publish(first[0], b"first")
    pool.publish(second[0], b"second")
    pool.release(first)
    pool.release(second)
    assert pool.num_cached_blocks == 2 and pool.num_free_blocks == 4
    assert set(pool.allocate(2) or []) == {2, 3}
    pool.share(first)  # used again: now the most recent
    pool.release(first)
    pool.allocate(1)
    assert pool.find(b"second") is None and pool.find(b"first") == first[0]
    pool.check()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    assert pool.allocate(2) == [2, 1]
    assert pool.find(bytes([0])) == 0


def test_the_first_block_of_equal_content_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2) or []
    assert [pool.publish(block, b"same") for block in blocks] == [True, False]
    assert pool.find(b"same") == blocks[0]
    pool.release([blocks[1]])
    assert pool.num_cached_blocks == 0, "the duplicate has nothing to offer"
    pool.check()
