"""Pool of KV block numbers: reference counts, the index of cached content, LRU eviction.

Engine thread only. Knows neither requests nor tensors: a block is an int, its content a hash. Each block is used
(referenced), cached (unreferenced, its content indexed, evictable) or empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks 0..num_blocks-1; every operation is O(1) per block.

    on_evict: called with (hash, block) before cached content is evicted.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes, int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.num_references = 0  # sum of all reference counts
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can return: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._empty) - len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def find(self, block_hash: bytes) -> int | None:
        """The used or cached block with this content, or None."""
        return self._block_of.get(block_hash)

    def find_all(self, block_hashes: Iterable[bytes]) -> tuple[int, ...] | None:
        """The blocks with these contents, or None if one is missing."""
        blocks = []
        for block_hash in block_hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                return None
            blocks.append(block)
        return tuple(blocks)

    def num_held(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """How many of these used or cached blocks, from the first on, are what `find` gives for these hashes."""
        held = self._hashes
        for count, (block, block_hash) in enumerate(zip(blocks, block_hashes)):
            if held[block] != block_hash:
                return count
        return min(len(blocks), len(block_hashes))

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take num_blocks blocks with one reference each. Returns None, changing nothing, if there are too few."""
        if num_blocks > len(self._empty) + len(self._cached):
            return None
        taken = []
        for _ in range(num_blocks):
            block = self._empty.pop() if self._empty else self._evict()
            self._ref_counts[block] = 1
            taken.append(block)
        self.num_references += num_blocks
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these used or cached blocks."""
        ref_counts = self._ref_counts
        for block in blocks:
            if ref_counts[block] == 0:
                del self._cached[block]
            ref_counts[block] += 1
        self.num_references += len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. The last block is evicted first: a prefix cannot be found without its start."""
        ref_counts = self._ref_counts
        for block in reversed(blocks):
            assert ref_counts[block] > 0, f"block {block} is freed twice"
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None
        self.num_references -= len(blocks)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Add a used block's content to the index, unless another block with the same content is in it: then False."""
        assert self._ref_counts[block] > 0, f"block {block} is published without an owner"
        if block_hash in self._block_of:
            return False
        assert self._hashes[block] is None, f"block {block} is published twice"
        self._block_of[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def count_unreferenced(self, blocks: Iterable[int]) -> int:
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def check(self) -> None:
        """Assert the pool's invariants; O(num_blocks), for tests."""
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert all(count >= 0 for count in self._ref_counts), "a reference count is negative"
        assert sum(self._ref_counts) == self.num_references, "num_references is off"
        assert len(set(self._empty)) == len(self._empty), "a block is twice among the empty ones"
        states = [used, set(self._empty), set(self._cached)]
        assert sum(map(len, states)) == self.num_blocks == len(set().union(*states)), "a block has no or two states"
        assert all(self._hashes[block] is None for block in self._empty), "an empty block is still findable"
        assert all(self._hashes[block] is not None for block in self._cached), "a cached block cannot be found"
        found = {block: block_hash for block_hash, block in self._block_of.items()}
        assert found == {block: h for block, h in enumerate(self._hashes) if h is not None}, "the index is off"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hashes[block] = None
        if self._on_evict is not None:
            self._on_evict(block_hash, block)
        return block
