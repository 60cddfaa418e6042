"""Blocks of the sliding-window groups: held while a step may still read them, found again by later prompts.

Engine thread only. A request's `window_block_ids` has an entry of one block per windowed group for each block of its
sequence, as `block_ids` has for full groups; entries before `first_window_block` were released, or never held.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.block_pool import BlockPool
from slipstream.core.kv_groups import KVGroups
from slipstream.core.request import Request


def group_hash(block_hash: bytes, group: int) -> bytes:
    """What the pool's index knows a group's block by: layers of two groups keep different keys for the same tokens."""
    return block_hash + bytes((group,)) if group else block_hash


class WindowBlocks:
    def __init__(self, pool: BlockPool, groups: KVGroups, block_size: int) -> None:
        self._pool, self._groups, self._block_size = pool, groups, block_size
        self._numbers = range(groups.num_full, groups.num_groups)
        self._max_blocks = groups.max_window_blocks(block_size)

    def held(self, request: Request) -> list[int]:
        return request.window_block_ids[request.first_window_block * len(self._numbers) :]

    def may_hold(self, request: Request, num_blocks: int) -> bool:
        return num_blocks <= request.first_window_block + self._max_blocks

    def num_missing(self, request: Request, num_blocks: int) -> int:
        """Blocks to allocate before the groups reach num_blocks entries, or as many as a request holds at once."""
        end = min(num_blocks, request.first_window_block + self._max_blocks)
        return max(0, end * len(self._numbers) - len(request.window_block_ids))

    def num_admitted(self, num_blocks: int, num_cached: int) -> int:
        """Blocks that a request of num_blocks holds right after it was admitted with a prefix of num_cached blocks."""
        first = self._groups.first_kept_block(num_cached * self._block_size, self._block_size)
        return min(num_blocks - first, self._max_blocks) * len(self._numbers)

    def find(self, block_hashes: Sequence[bytes]) -> list[tuple[int, ...]]:
        """The longest prefix of these whose last window is cached in every windowed group.

        Returns its blocks, () where the window has passed: they are not needed.
        """
        num_blocks, lowest = len(block_hashes), 0
        window: list[tuple[int, ...]] = []
        while num_blocks:
            lowest = self._groups.first_kept_block(num_blocks * self._block_size, self._block_size)
            window = []
            for index in range(num_blocks - 1, lowest - 1, -1):
                blocks = self._pool.find_all(group_hash(block_hashes[index], group) for group in self._numbers)
                if blocks is None:
                    num_blocks = index  # no longer prefix can do without this block
                    break
                window.append(blocks)
            else:
                break
        return [()] * lowest + window[::-1] if num_blocks else []

    def take(self, request: Request, entries: Sequence[tuple[int, ...]]) -> None:
        """Hold a prefix that `find` returned; its blocks are shared by the caller."""
        request.first_window_block = sum(not entry for entry in entries)
        passed = [0] * (request.first_window_block * len(self._numbers))  # any block: steps do not read them
        request.window_block_ids = passed + [block for entry in entries for block in entry]

    def publish(self, request: Request, index: int) -> None:
        start, block_hash = index * len(self._numbers), request.block_hashes[index]
        for group, block in zip(self._numbers, request.window_block_ids[start : start + len(self._numbers)]):
            self._pool.publish(block, group_hash(block_hash, group))

    def release_passed(self, request: Request) -> None:
        """Release the blocks that no step from request.num_computed_tokens on reads; what they hold is published."""
        first = self._groups.first_kept_block(request.num_computed_tokens, self._block_size)
        if first > request.first_window_block:
            size = len(self._numbers)
            self._pool.release(request.window_block_ids[request.first_window_block * size : first * size])
            request.first_window_block = first

    def free(self, request: Request) -> None:
        self._pool.release(self.held(request))
        request.window_block_ids, request.first_window_block = [], 0
