"""Maps requests to KV blocks: block tables, the hash-chained prefix cache, admission arithmetic.

Engine thread only. Handles block numbers; the tensors belong to worker/model_runner.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter

from slipstream.core.block_pool import BlockPool
from slipstream.core.host_cache import BlockCopies, HostCache
from slipstream.core.host_loads import HostLoads
from slipstream.core.kv_events import DEVICE, AllCleared, BlockRemoved, BlockStored, KVEventSink
from slipstream.core.kv_groups import ONE_GROUP, KVGroups
from slipstream.core.prefix import IN_HOST_MEMORY, Prefix, grow_hashes, hash_block
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.core.window_blocks import WindowBlocks, group_hash


class KVCacheManager:
    """Grows, shares and frees `request.block_ids` and `request.window_block_ids`.

    Only full blocks are shared and they are never written again, so there is no copy on write. A request always
    computes at least its last token, whose logits are needed. With host blocks, evicted content is stored in host
    memory and loaded when a request starts with it again (a resumed request or a cold prefix). most_loads: blocks that
    a step loads beside other running requests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        groups: KVGroups = ONE_GROUP,
        events: KVEventSink | None = None,
        most_loads: float = math.inf,
    ) -> None:
        assert num_blocks > 0 and block_size > 0
        assert groups.num_groups == 1 or not num_host_blocks, "host memory holds blocks of one group"
        self.block_size = block_size
        self.groups = groups
        self.enable_prefix_caching = enable_prefix_caching
        self._sizes = num_blocks, num_host_blocks if enable_prefix_caching else 0
        self._most_loads = most_loads
        self.num_prefix_queries = 0  # tokens looked up, over all admissions
        self.num_prefix_hits = 0  # tokens found
        self._events = events if enable_prefix_caching else None
        self._forget()

    def clear(self) -> None:
        """Forget all content, also that in host memory. No request may hold a block."""
        self._forget()
        if self._events is not None:
            self._events.add(AllCleared())

    def _forget(self) -> None:
        num_blocks, num_host_blocks = self._sizes
        self.host = HostCache(num_host_blocks, self._events) if num_host_blocks else None
        self._loads = HostLoads(self.host, self._most_loads) if self.host is not None else None
        self.pool = BlockPool(num_blocks, self._evicted if self._events is not None or self.host is not None else None)
        self._computing: dict[bytes, Request] = {}  # prompt blocks that a running request will publish
        self.windows = WindowBlocks(self.pool, self.groups, self.block_size) if self.groups.num_windowed else None

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_used_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request holds at once while it grows to num_tokens."""
        return self.groups.max_blocks(num_tokens, self.block_size)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request that the pool can hold."""
        return self.groups.max_tokens(self.num_blocks, self.block_size)

    # ---- admission: hash, find, check, allocate

    def hash_prompt(self, sequences: Sequence[Request]) -> None:
        """Hash the prompt shared by these sequences once, before they are added. Any thread: changes no own state."""
        if self.enable_prefix_caching:
            grow_hashes(sequences[0], sequences[0].num_tokens, self.block_size)
            for other in sequences[1:]:
                other.block_hashes = list(sequences[0].block_hashes)

    def find_prefix(self, request: Request) -> Prefix:
        """The request's longest cached prefix, at most (num_tokens - 1) // block_size blocks. Takes no reference."""
        if not self._may_match(request):
            return Prefix([])
        grow_hashes(request, request.num_tokens, self.block_size)
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        if self.groups.num_groups > 1:
            return self._found_in_all(hashes)
        blocks, find, host = request.guessed_blocks, self.pool.find, self.host
        blocks = blocks[: self.pool.num_held(blocks, hashes)]
        num_guessed, num_hosted = len(blocks), 0
        for block_hash in hashes[num_guessed:]:
            block = find(block_hash)
            if block is None:
                if host is None or host.find(block_hash) is None:
                    break
                block, num_hosted = IN_HOST_MEMORY, num_hosted + 1
            blocks.append(block)
        if len(blocks) > num_guessed and not num_hosted:  # it may have to wait for others, and ask in each step
            request.guessed_blocks = blocks
        return Prefix(blocks, num_hosted)

    def is_prefix_underway(self, request: Request, num_found: int) -> bool:
        """Whether a running request is computing the first block missing here; waiting avoids computing it twice. Not
        if that request comes later in order: it may get no tokens for as long as there are others."""
        most = (request.num_tokens - 1) // self.block_size
        if not self._may_match(request) or num_found >= most:
            return False
        hashes = request.block_hashes
        other = self._computing.get(hashes[num_found])
        if other is None or other.sort_key > request.sort_key:
            return False
        blocks = range(num_found, most)
        num_shared = bisect_left(blocks, True, key=lambda index: self._computing.get(hashes[index]) is not other)
        request.awaited_hash = hashes[num_found + num_shared - 1]
        return True

    def awaits_prefix(self, request: Request) -> bool:
        """Whether what `is_prefix_underway` has found still holds. One look-up, so that many requests can wait for a
        long prefix."""
        other = self._computing.get(request.awaited_hash)
        return other is not None and other.sort_key <= request.sort_key

    def can_admit(self, request: Request, prefix: Prefix, num_spare_blocks: int = 0) -> bool:
        """Whether blocks for all current tokens can be allocated after sharing `prefix`, with num_spare_blocks left."""
        shared = prefix.on_device()
        num_blocks = -(-request.num_tokens // self.block_size)
        num_new = self.groups.num_full * num_blocks - len(shared)
        if self.windows is not None:
            num_new += self.windows.num_admitted(num_blocks, len(prefix))
        num_left = self.pool.num_free_blocks - self.pool.count_unreferenced(shared) - num_new
        return num_left >= num_spare_blocks

    def admit(self, request: Request, prefix: Prefix) -> int:
        """Share `prefix` and allocate blocks for all current tokens, in windowed groups for the first step's;
        `can_admit` must hold.

        Returns the number of cached tokens; they count as computed.
        """
        num_cached = self._share(request, prefix)
        is_allocated = self._extend(request, -(-request.num_tokens // self.block_size))
        assert is_allocated, "admit without can_admit"
        if self.enable_prefix_caching:
            for block_hash in request.block_hashes[len(prefix) : request.num_tokens // self.block_size]:
                self._computing.setdefault(block_hash, request)
        return num_cached

    # ---- copies between device and host

    def begin_step(self, num_running: int, prefills: list[Request]) -> list[Request]:
        """Before a step takes these requests' tokens. Returns them and those whose last loads it makes, in order."""
        loaded = self._loads.begin_step(num_running) if self._loads is not None else []
        return sorted([*prefills, *loaded], key=attrgetter("sort_key")) if loaded else prefills

    def must_wait(self, prefix: Prefix) -> bool:
        """Whether a request, admitted with this prefix now, is to start in a later step, which has it loaded."""
        return self._loads is not None and self._loads.must_wait(prefix)

    def is_free_to_write(self, step: ScheduledStep) -> bool:
        """Whether a step of the same requests may be launched behind this one without any copies."""
        host = self.host
        return host is None or not (host.has_loads or host.awaits_store(step.written_blocks(self.block_size)))

    def take_copies(self, step: ScheduledStep) -> BlockCopies:
        """The copies between device and host to make before this step computes."""
        host = self.host
        return step.copies if host is None else host.take_copies(step.written_blocks(self.block_size))

    # ---- while a request runs

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Hold blocks for `num_tokens`. Returns False, changing nothing, if blocks are short.

        Windowed groups hold their window and a step at most, and return False beyond: see `advance`.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if self.windows is not None and not self.windows.may_hold(request, num_blocks):
            return False
        return self._extend(request, num_blocks)

    def add_blocks(self, requests: Sequence[Request]) -> bool:
        """Hold one more block for each request. Returns False, changing nothing, if blocks are short. For caches with
        one group."""
        assert self.groups.num_groups == 1
        blocks = self.pool.allocate(len(requests))
        if blocks is None:
            return False
        for request, block in zip(requests, blocks):
            request.block_ids.append(block)
            request.num_slots += self.block_size
            request.num_new_blocks += 1
        return True

    def advance(self, request: Request) -> None:
        """Release the blocks that windows have passed, before a step from request.num_computed_tokens on is scheduled:
        all earlier steps have been launched, and no later one reads before that step's windows."""
        if self.windows is not None:
            self.commit(request)
            self.windows.release_passed(request)

    def commit(self, request: Request) -> None:
        """Publish the blocks filled with computed tokens to the prefix cache."""
        if not self.enable_prefix_caching:
            return
        num_full, num_published = request.num_computed_tokens // self.block_size, request.num_published_blocks
        if num_full <= num_published:
            return
        grow_hashes(request, num_full * self.block_size, self.block_size)
        hashes, has_one_group = request.block_hashes, self.groups.num_groups == 1
        for index in range(num_published, num_full):
            block_hash = hashes[index]
            if has_one_group:
                is_new = self.pool.publish(request.block_ids[index], block_hash)
            else:
                is_new = self._publish_all(request, index)
            if is_new and self._events is not None:
                self._tell_stored(request, index)
            self._computing.pop(block_hash, None)
        request.num_published_blocks = num_full

    def commit_filled(self, requests: Sequence[Request]) -> None:
        """`commit` of decodes, each of which has filled a block: a hash, and an entry in the pool."""
        size, publish, computing = self.block_size, self.pool.publish, self._computing
        is_plain = self.enable_prefix_caching and self.groups.num_groups == 1 and self._events is None
        for request in requests:
            hashes, index = request.block_hashes, request.num_published_blocks
            if not (is_plain and 0 < index == len(hashes) == request.num_computed_tokens // size - 1):
                self.commit(request)
                continue
            block_hash = hash_block(hashes[-1], request.token_ids[index * size : (index + 1) * size])
            hashes.append(block_hash)
            publish(request.block_ids[index], block_hash)
            computing.pop(block_hash, None)
            request.num_published_blocks = index + 1

    def free(self, request: Request) -> None:
        """Release all blocks, if any; published content can be found until it is evicted."""
        if not request.block_ids:
            return
        if self._loads is not None:
            self._loads.forget(request)
        if self.windows is not None:
            self.windows.free(request)
        self.pool.release(request.block_ids)
        request.guessed_blocks, request.block_ids, request.num_slots = request.block_ids, [], 0
        if self._computing:
            for block_hash in request.block_hashes[request.num_published_blocks :]:
                if self._computing.get(block_hash) is request:
                    del self._computing[block_hash]
        request.num_published_blocks = 0

    def leaked_blocks(self, live_requests: Iterable[Request]) -> int:
        """Number of used blocks that no live request holds. Not 0: a bug."""
        requests = list(live_requests)
        held = [request.block_ids for request in requests]
        if self.windows is not None:
            held += map(self.windows.held, requests)
        if sum(map(len, held)) == self.pool.num_references:
            return 0
        return self.pool.num_used_blocks - len(set().union(*held))

    # ---- parts

    def _extend(self, request: Request, num_blocks: int) -> bool:
        """Hold num_blocks blocks in every full group, and as many of them as may be in windowed ones."""
        num_new = max(0, num_blocks * self.groups.num_full - len(request.block_ids))
        num_window = 0 if self.windows is None else self.windows.num_missing(request, num_blocks)
        if num_new + num_window == 0:
            return True
        blocks = self.pool.allocate(num_new + num_window)
        if blocks is None:
            return False
        request.block_ids += blocks[:num_new]
        request.window_block_ids += blocks[num_new:]
        request.num_new_blocks += len(blocks)
        self._count_slots(request)
        return True

    def _count_slots(self, request: Request) -> None:
        num_blocks = len(request.block_ids) // self.groups.num_full
        if self.windows is not None:
            num_blocks = min(num_blocks, len(request.window_block_ids) // self.groups.num_windowed)
        request.num_slots = num_blocks * self.block_size

    def _found_in_all(self, hashes: Sequence[bytes]) -> Prefix:
        """The longest prefix that every group has: full groups all of it, windowed ones its last window."""
        found: list[tuple[int, ...]] = []
        for block_hash in hashes:
            row = self.pool.find_all(group_hash(block_hash, group) for group in range(self.groups.num_full))
            if row is None:
                break
            found.append(row)
        windows: list[tuple[int, ...]] = []
        if self.windows is not None:
            windows = self.windows.find(hashes[: len(found)])
            del found[len(windows) :]
        return Prefix([row[0] for row in found], others=[row[1:] for row in found], windows=windows)

    def _publish_all(self, request: Request, index: int) -> bool:
        """Whether the first group's is new, by which a block is known."""
        num_full, block_hash = self.groups.num_full, request.block_hashes[index]
        own = request.block_ids[index * num_full : (index + 1) * num_full]
        are_new = [self.pool.publish(block, group_hash(block_hash, group)) for group, block in enumerate(own)]
        if self.windows is not None:
            self.windows.publish(request, index)
        return are_new[0]

    # ---- events

    def _tell_stored(self, request: Request, index: int) -> None:
        """Not of requests with a salt: their prefixes are nobody else's to know."""
        adapter = request.adapter
        own_key = b"" if adapter is None else adapter.prefix_key
        if self._events is None or request.prefix_key != own_key:
            return
        parent = request.block_hashes[index - 1] if index else None
        token_ids = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
        name = "" if adapter is None else adapter.name
        self._events.add(BlockStored(request.block_hashes[index], parent, token_ids, DEVICE, name))

    def _evicted(self, block_hash: bytes, block: int) -> None:
        if self.host is not None:
            self.host.store(block_hash, block)
        if self._events is not None:
            self._events.add(BlockRemoved(block_hash, DEVICE))

    # ---- prefix hashes

    def _may_match(self, request: Request) -> bool:
        """False for prompt log-probabilities, which need every prompt token computed."""
        needs_all = request.params.prompt_logprobs is not None and request.num_output_tokens == 0
        return self.enable_prefix_caching and not needs_all

    def _share(self, request: Request, prefix: Prefix) -> int:
        assert not request.block_ids, "a prefix is matched before anything is allocated"
        num_cached = len(prefix) * self.block_size
        request.block_ids = self._take(request, prefix)
        if self.windows is not None:
            self.windows.take(request, prefix.windows)
        self._count_slots(request)
        for index, block in enumerate(prefix.blocks if self._events is not None and prefix.num_hosted else ()):
            if block == IN_HOST_MEMORY:  # from where it comes back
                self._tell_stored(request, index)
        request.num_published_blocks = len(prefix)
        request.num_reused_blocks += len(prefix)
        request.num_computed_tokens = num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
        if self.enable_prefix_caching:
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += num_cached
        return num_cached

    def _take(self, request: Request, prefix: Prefix) -> list[int]:
        """Reference each block of a prefix; allocate device blocks for those in host memory and queue their loads."""
        self.pool.share(prefix.on_device())
        if prefix.others:
            return [block for row in zip(prefix.blocks, prefix.others) for block in (row[0], *row[1])]
        block_ids = list(prefix.blocks)
        if self.host is None or self._loads is None:
            return block_ids
        places = [place for place, block in enumerate(block_ids) if block == IN_HOST_MEMORY]
        # reserve all first: allocation may evict content into host memory
        host_blocks = [self.host.reserve(request.block_hashes[place]) for place in places]
        new_blocks = self.pool.allocate(len(host_blocks))
        assert new_blocks is not None, "a prefix is taken without can_admit"
        self._loads.take(request, prefix, list(zip(host_blocks, new_blocks)))
        for place, block in zip(places, new_blocks):
            block_ids[place] = block
            self.pool.publish(block, request.block_hashes[place])
        return block_ids
