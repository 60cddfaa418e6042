"""Maps requests to KV blocks: block tables, the hash-chained prefix cache, admission arithmetic.

Engine thread only. Handles block numbers; the tensors belong to worker/model_runner.py.
A block's hash covers its tokens and its parent's hash, so equal hashes mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slipstream.core.block_pool import BlockPool
from slipstream.core.host_cache import BlockCopies, HostCache
from slipstream.core.request import Request

_HASH_BYTES = 16  # finding a collision takes about 2^64 blocks, also on purpose


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block after `parent` (the previous block's hash, or `hash_root`). Stable across processes."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=_HASH_BYTES).digest()


def hash_root(prefix_key: bytes) -> bytes:
    """The parent hash of a first block. prefix_key: see Request."""
    return hashlib.blake2b(prefix_key, person=b"slipstream root", digest_size=_HASH_BYTES).digest()


class FoundBlock(NamedTuple):
    """A cached full block of a request's prefix. device_block None: in host memory only."""

    block_hash: bytes
    device_block: int | None


class KVCacheManager:
    """Grows, shares and frees `request.block_ids`.

    Only full blocks are shared and they are never written again, so there is no copy on write. A request always
    computes at least its last token, whose logits are needed. With host blocks, evicted content is stored in host
    memory and loaded when a request starts with it again (a resumed request or a cold prefix).
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, num_host_blocks: int = 0
    ) -> None:
        assert num_blocks > 0 and block_size > 0
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.host = HostCache(num_host_blocks) if num_host_blocks and enable_prefix_caching else None
        self.pool = BlockPool(num_blocks, self.host.store if self.host is not None else None)
        self.num_prefix_queries = 0  # tokens looked up, over all admissions
        self.num_prefix_hits = 0  # tokens found
        self._computing: dict[bytes, Request] = {}  # prompt blocks that a running request will publish

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
        return -(-num_tokens // self.block_size)

    # ---- admission: hash, find, check, allocate

    def hash_prompt(self, sequences: Sequence[Request]) -> None:
        """Hash the prompt shared by these sequences once, before they are added. Any thread: changes no own state."""
        if self.enable_prefix_caching:
            self._grow_hashes(sequences[0], sequences[0].num_tokens)
            for other in sequences[1:]:
                other.block_hashes = list(sequences[0].block_hashes)

    def find_prefix(self, request: Request) -> list[FoundBlock]:
        """The request's longest cached prefix, at most (num_tokens - 1) // block_size blocks. Takes no reference."""
        if not self._may_match(request):
            return []
        self._grow_hashes(request, request.num_tokens)
        found: list[FoundBlock] = []
        find = self.pool.find
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = find(block_hash)
            if block is None and (self.host is None or self.host.find(block_hash) is None):
                break
            found.append(FoundBlock(block_hash, block))
        return found

    def is_prefix_underway(self, request: Request, num_found: int) -> bool:
        """Whether a running request is computing the first block missing here; waiting avoids computing it twice."""
        if not self._may_match(request) or num_found >= (request.num_tokens - 1) // self.block_size:
            return False
        return request.block_hashes[num_found] in self._computing

    def can_admit(self, request: Request, prefix: Sequence[FoundBlock], num_spare_blocks: int = 0) -> bool:
        """Whether blocks for all current tokens can be allocated after sharing `prefix`, with num_spare_blocks left."""
        shared = _on_device(prefix)
        num_new = self.num_blocks_for(request.num_tokens) - len(shared)
        num_left = self.pool.num_free_blocks - self.pool.count_unreferenced(shared) - num_new
        return num_left >= num_spare_blocks

    def admit(self, request: Request, prefix: list[FoundBlock]) -> int:
        """Share `prefix` and allocate blocks for all current tokens; `can_admit` must hold.

        Returns the number of cached tokens; they count as computed.
        """
        num_cached = self._share(request, prefix)
        is_allocated = self.allocate(request, request.num_tokens)
        assert is_allocated, "admit without can_admit"
        if self.enable_prefix_caching:
            for block_hash in request.block_hashes[len(prefix) : request.num_tokens // self.block_size]:
                self._computing.setdefault(block_hash, request)
        return num_cached

    def match_prefix(self, request: Request) -> int:
        """Share the request's longest cached prefix; returns its number of tokens (<= num_tokens - 1)."""
        return self._share(request, self.find_prefix(request))

    def take_copies(self) -> BlockCopies:
        """The copies between device and host to make before the step being scheduled computes."""
        return self.host.take_copies() if self.host is not None else BlockCopies()

    # ---- while a request runs

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Grow request.block_ids to hold `num_tokens`. Returns False, changing nothing, if blocks are short."""
        num_new = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if num_new <= 0:
            return True
        blocks = self.pool.allocate(num_new)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        request.num_new_blocks += num_new
        return True

    def commit(self, request: Request) -> None:
        """Publish the blocks filled with computed tokens to the prefix cache."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        self._grow_hashes(request, num_full * self.block_size)
        for index in range(request.num_published_blocks, num_full):
            block_hash = request.block_hashes[index]
            self.pool.publish(request.block_ids[index], block_hash)
            self._computing.pop(block_hash, None)
        request.num_published_blocks = max(request.num_published_blocks, num_full)

    def free(self, request: Request) -> None:
        """Release all blocks, if any; published content can be found until it is evicted."""
        if not request.block_ids:
            return
        self.pool.release(request.block_ids)
        request.block_ids = []
        if self._computing:
            for block_hash in request.block_hashes[request.num_published_blocks :]:
                if self._computing.get(block_hash) is request:
                    del self._computing[block_hash]
        request.num_published_blocks = 0

    def leaked_blocks(self, live_requests: Iterable[Request]) -> int:
        """Number of used blocks that no live request holds. Not 0: a bug."""
        held = {block for request in live_requests for block in request.block_ids}
        return self.pool.num_used_blocks - len(held)

    # ---- prefix hashes

    def _may_match(self, request: Request) -> bool:
        """False for prompt log-probabilities, which need every prompt token computed."""
        needs_all = request.params.prompt_logprobs is not None and request.num_output_tokens == 0
        return self.enable_prefix_caching and not needs_all

    def _grow_hashes(self, request: Request, num_tokens: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) >= num_tokens // size:
            return
        parent = hashes[-1] if hashes else hash_root(request.prefix_key)
        for start in range(len(hashes) * size, num_tokens - size + 1, size):
            parent = hash_block(parent, request.token_ids[start : start + size])
            hashes.append(parent)

    def _share(self, request: Request, prefix: list[FoundBlock]) -> int:
        assert not request.block_ids, "a prefix is matched before anything is allocated"
        num_cached = len(prefix) * self.block_size
        request.block_ids = self._take(prefix)
        request.num_published_blocks = len(prefix)
        request.num_reused_blocks += len(prefix)
        request.num_computed_tokens = num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
        if self.enable_prefix_caching:
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += num_cached
        return num_cached

    def _take(self, prefix: list[FoundBlock]) -> list[int]:
        """Reference each block of a prefix; allocate device blocks for those in host memory and queue their loads."""
        self.pool.share(_on_device(prefix))
        if self.host is None:
            return _on_device(prefix)
        # reserve all first: allocation may evict content into host memory
        host_blocks = [self.host.reserve(found.block_hash) for found in prefix if found.device_block is None]
        new_blocks = self.pool.allocate(len(host_blocks))
        assert new_blocks is not None, "a prefix is taken without can_admit"
        for host_block, block in zip(host_blocks, new_blocks):
            self.host.load(host_block, block)
        arrived = iter(new_blocks)
        block_ids = []
        for found in prefix:
            if found.device_block is None:
                block_ids.append(next(arrived))
                self.pool.publish(block_ids[-1], found.block_hash)
            else:
                block_ids.append(found.device_block)
        return block_ids


def _on_device(prefix: Sequence[FoundBlock]) -> list[int]:
    return [found.device_block for found in prefix if found.device_block is not None]
