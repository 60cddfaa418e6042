"""Prefixes in blocks: the hashes that name their content, and where a cached one was found.

A block's hash covers its tokens and its parent's hash, so equal hashes mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from struct import Struct

from slipstream.core.request import Request

IN_HOST_MEMORY = -1
_HASH_BYTES = 16  # finding a collision takes about 2^64 blocks, also on purpose


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block after `parent` (the previous block's hash, or `hash_root`). Stable across processes."""
    return hashlib.blake2b(_packer(len(token_ids))(*token_ids), key=parent, digest_size=_HASH_BYTES).digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    """Makes bytes of so many token ids, 64 bits each, in half the time of an array."""
    return Struct(f"{count}q").pack


def salted_key(salt: str) -> bytes:
    """What begins the prefix_key of a client's request: of one length, so that no salt spells what comes behind it."""
    return hashlib.blake2b(salt.encode(), person=b"slipstream salt", digest_size=_HASH_BYTES).digest() if salt else b""


def hash_root(prefix_key: bytes) -> bytes:
    """The parent hash of a first block. prefix_key: see Request."""
    return hashlib.blake2b(prefix_key, person=b"slipstream root", digest_size=_HASH_BYTES).digest()


def grow_hashes(request: Request, num_tokens: int, block_size: int) -> None:
    """Append the hashes that are missing of the full blocks among its first num_tokens."""
    hashes = request.block_hashes
    if len(hashes) >= num_tokens // block_size:
        return
    parent = hashes[-1] if hashes else hash_root(request.prefix_key)
    for start in range(len(hashes) * block_size, num_tokens - block_size + 1, block_size):
        parent = hash_block(parent, request.token_ids[start : start + block_size])
        hashes.append(parent)


@dataclass(slots=True)
class Prefix:
    """A request's longest cached prefix: lists with an entry per block, because a tuple per block would cost more than
    finding it.

    blocks: of the first KV group; IN_HOST_MEMORY: num_hosted of them, which are nowhere else. others, windows: the same
    tokens' blocks of further full groups and of windowed groups, none where a window has passed; empty with one group.
    """

    blocks: list[int]
    num_hosted: int = 0
    others: list[tuple[int, ...]] = field(default_factory=list)
    windows: list[tuple[int, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks)

    def on_device(self) -> list[int]:
        """All blocks on the device, of all groups."""
        if not (self.num_hosted or self.others or self.windows):
            return self.blocks
        blocks = [block for block in self.blocks if block != IN_HOST_MEMORY]
        return blocks + list(chain.from_iterable(self.others)) + list(chain.from_iterable(self.windows))
