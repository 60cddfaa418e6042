"""Host-memory tier of the prefix cache: the index of evicted blocks and the copies that steps must make.

Engine thread only. Knows neither requests nor tensors: a host block is an int, its content a hash. worker/kv_offload.py
copies: first a step's stores, then its loads; then the step computes.

A step never waits for more than it needs. Evicted content stays where it is until a step writes into its device block;
loads are made in order, as many a step as core/host_loads.py allows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.core.kv_events import HOST, BlockRemoved, BlockStored, KVEventSink
from slipstream.core.stats import Metric, Stats


@dataclass(slots=True)
class BlockCopies:
    """Copies before a step computes, as pairs (device block, host block). All stores precede all loads."""

    stores: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads)


class _Load(NamedTuple):
    host_block: int
    number: int  # loads are numbered from 1 on, in order


class HostCache:
    """Blocks 0..num_blocks-1 of host memory, evicted least recently used first. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int, events: KVEventSink | None = None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._events = events
        self.num_stored = 0  # blocks copied to the host since start
        self.num_loaded = 0  # blocks copied to the device since start
        self._recorded = 0, 0
        self._block_of: dict[bytes, int] = {}
        self._unread: OrderedDict[bytes, None] = OrderedDict()  # what no load reads, least recently used first
        self._readers: dict[int, bytes] = {}  # host blocks that pending loads read, and what they hold
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._stores: dict[int, int] = {}  # pending: by device block the host block
        self._source_of: dict[int, int] = {}  # the other way round
        self._loads: OrderedDict[int, _Load] = OrderedDict()  # pending: by device block, in order
        self._num_queued = self._num_allowed = 0  # numbers of the last load queued, and of the last that may be made

    @property
    def num_used_blocks(self) -> int:
        return len(self._block_of)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    # ---- stores

    def store(self, block_hash: bytes, device_block: int) -> None:
        """Keep evicted device content, unless it is stored already: it is copied before its block is written."""
        load = self._loads.pop(device_block, None)
        if load is not None:  # it has not come yet, so the device has nothing to keep
            self._release(load.host_block)
        if block_hash in self._block_of:
            if block_hash in self._unread:
                self._unread.move_to_end(block_hash)
            return
        host_block = self._empty.pop() if self._empty else self._evict()
        if host_block is None:
            return
        assert device_block not in self._stores, f"device block {device_block} is evicted twice without a write"
        self._block_of[block_hash] = host_block
        self._unread[block_hash] = None
        self._stores[device_block], self._source_of[host_block] = host_block, device_block
        if self._events is not None:
            self._events.add(BlockStored(block_hash, None, (), HOST))

    def awaits_store(self, device_blocks: Iterable[int]) -> bool:
        """Whether one of these blocks has content that a step must store before it is written."""
        return bool(self._stores) and any(block in self._stores for block in device_blocks)

    # ---- loads

    def reserve(self, block_hash: bytes) -> int:
        """Protect stored content from eviction until it is loaded. Returns its host block."""
        host_block = self._block_of[block_hash]
        self._unread.pop(block_hash, None)
        self._readers[host_block] = block_hash
        return host_block

    def load(self, host_block: int, device_block: int) -> None:
        """Queue a copy of a reserved block to a device block."""
        assert device_block not in self._loads, f"device block {device_block} is loaded twice"
        self._num_queued += 1
        self._loads[device_block] = _Load(host_block, self._num_queued)

    @property
    def has_loads(self) -> bool:
        return bool(self._loads)

    @property
    def last_load(self) -> int:
        """The number of the last pending load, 0 if there is none."""
        return next(reversed(self._loads.values())).number if self._loads else 0

    def last_load_of(self, device_blocks: Iterable[int]) -> int:
        """Likewise of the loads of these blocks."""
        loads = self._loads
        return max((loads[block].number for block in device_blocks if block in loads), default=0)

    def may_load(self, number: int) -> bool:
        """Whether the load of that number was allowed, so that it is made before the next step computes."""
        return number <= self._num_allowed

    def allow_to(self, number: int) -> None:
        """Allow the loads up to the one of that number."""
        self._num_allowed = max(self._num_allowed, number)

    def allow_more(self, num_blocks: float) -> int:
        """Allow the next num_blocks loads. Returns how many of them there were."""
        count = 0
        for load in self._loads.values():
            if count == num_blocks:
                break
            if load.number > self._num_allowed:
                self._num_allowed, count = load.number, count + 1
        return count

    # ---- the step

    def take_copies(self, written: Iterable[int]) -> BlockCopies:
        """The copies to make before a step that writes these device blocks: what they hold to the host, and the loads
        that are allowed, with stores of what those read or overwrite."""
        copies = BlockCopies()
        if self._stores:
            for block in written:
                self._take_store(block, copies)
        while self._loads:
            device_block, load = next(iter(self._loads.items()))
            if load.number > self._num_allowed:
                break
            del self._loads[device_block]
            self._take_store(device_block, copies)
            if load.host_block in self._source_of:
                self._take_store(self._source_of[load.host_block], copies)
            copies.loads.append((device_block, load.host_block))
            self._release(load.host_block)
        self.num_stored += len(copies.stores)
        self.num_loaded += len(copies.loads)
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
        hashes = [*self._unread, *self._readers.values()]
        assert sorted(hashes) == sorted(self._block_of), "stored content can neither be evicted nor is it read"
        assert all(self._block_of[block_hash] == block for block, block_hash in self._readers.items())
        assert {load.host_block for load in self._loads.values()} == set(self._readers), "a reader without a load"
        assert {block: source for source, block in self._stores.items()} == self._source_of
        assert set(self._source_of) <= set(used), "a store into a host block that has been given up"
        numbers = [load.number for load in self._loads.values()]
        assert numbers == sorted(numbers), "loads are out of order"

    # ---- parts

    def _take_store(self, device_block: int, copies: BlockCopies) -> None:
        host_block = self._stores.pop(device_block, None)
        if host_block is not None:
            del self._source_of[host_block]
            copies.stores.append((device_block, host_block))

    def _release(self, host_block: int) -> None:
        """Let reserved content be evicted again."""
        self._unread[self._readers.pop(host_block)] = None

    def _evict(self) -> int | None:
        """Evict the least recently used block that no pending load reads; None if there is none."""
        if not self._unread:
            return None
        block_hash, _ = self._unread.popitem(last=False)
        host_block = self._block_of.pop(block_hash)
        device_block = self._source_of.pop(host_block, None)
        if device_block is not None:
            del self._stores[device_block]
        if self._events is not None:
            self._events.add(BlockRemoved(block_hash, HOST))
        return host_block
