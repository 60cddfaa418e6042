"""Host-memory tier of the prefix cache: the index of evicted blocks and the copies that each step must make.

Engine thread only. Knows neither requests nor tensors: a host block is an int, its content a hash. worker/kv_offload.py
copies: first a step's stores, then its loads; then the step computes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from slipstream.core.kv_events import HOST, BlockRemoved, BlockStored, KVEventSink
from slipstream.core.stats import Metric, Stats


@dataclass(slots=True)
class BlockCopies:
    """Copies before a step computes, as pairs (device block, host block). All stores precede all loads."""

    stores: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads)


class HostCache:
    """Blocks 0..num_blocks-1 of host memory, evicted least recently used first."""

    def __init__(self, num_blocks: int, events: KVEventSink | None = None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._events = events
        self.num_stored = 0  # blocks copied to the host since start
        self.num_loaded = 0  # blocks copied to the device since start
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._recorded = 0, 0
        self._copies = BlockCopies()
        self._loading: set[int] = set()  # host blocks that pending loads read

    @property
    def num_used_blocks(self) -> int:
        return len(self._block_of)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def store(self, block_hash: bytes, device_block: int) -> None:
        """Queue a copy of device content that is about to be overwritten, unless it is stored already."""
        if block_hash in self._block_of:
            self._block_of.move_to_end(block_hash)
            return
        host_block = self._empty.pop() if self._empty else self._evict()
        if host_block is None:
            return
        self._block_of[block_hash] = host_block
        self._copies.stores.append((device_block, host_block))
        self.num_stored += 1
        if self._events is not None:
            self._events.add(BlockStored(block_hash, None, (), HOST))

    def reserve(self, block_hash: bytes) -> int:
        """Protect stored content from eviction until `take_copies`. Returns its host block."""
        self._block_of.move_to_end(block_hash)
        host_block = self._block_of[block_hash]
        self._loading.add(host_block)
        return host_block

    def load(self, host_block: int, device_block: int) -> None:
        """Queue a copy of a reserved block to a device block."""
        self._copies.loads.append((device_block, host_block))
        self.num_loaded += 1

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def take_copies(self) -> BlockCopies:
        """The copies queued since the last call; the caller makes them before anything else touches the blocks."""
        copies, self._copies = self._copies, BlockCopies()
        self._loading.clear()
        return copies

    def record(self, stats: Stats) -> None:
        """Update the gauges and add the copies since the last call to the counters."""
        stats.set(Metric.KV_HOST_BLOCKS_USED, self.num_used_blocks)
        stats.set(Metric.KV_HOST_BLOCKS_TOTAL, self.num_blocks)
        stats.add(Metric.KV_BLOCKS_STORED, self.num_stored - self._recorded[0])
        stats.add(Metric.KV_BLOCKS_LOADED, self.num_loaded - self._recorded[1])
        self._recorded = self.num_stored, self.num_loaded

    def check(self) -> None:
        """Assert the invariants; O(num_blocks), for tests."""
        used = list(self._block_of.values())
        assert sorted(used + self._empty) == list(range(self.num_blocks)), "a host block has no or two states"

    def _evict(self) -> int | None:
        """Evict the least recently used block that no pending load reads; None if there is none."""
        for block_hash, host_block in self._block_of.items():
            if host_block not in self._loading:
                del self._block_of[block_hash]
                if self._events is not None:
                    self._events.add(BlockRemoved(block_hash, HOST))
                return host_block
        return None
