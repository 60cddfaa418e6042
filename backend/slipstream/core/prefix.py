"""Prefixes in blocks: the hashes that name their content, and where a cached one was found.

A block's hash covers its tokens and its parent's hash, so equal hashes mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

_HASH_BYTES = 16  # finding a collision takes about 2^64 blocks, also on purpose


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block after `parent` (the previous block's hash, or `hash_root`). Stable across processes."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=_HASH_BYTES).digest()


def salted_key(salt: str) -> bytes:
    """What begins the prefix_key of a client's request: of one length, so that no salt spells what comes behind it."""
    return hashlib.blake2b(salt.encode(), person=b"slipstream salt", digest_size=_HASH_BYTES).digest() if salt else b""


def hash_root(prefix_key: bytes) -> bytes:
    """The parent hash of a first block. prefix_key: see Request."""
    return hashlib.blake2b(prefix_key, person=b"slipstream root", digest_size=_HASH_BYTES).digest()


class FoundBlock(NamedTuple):
    """A cached full block of a request's prefix. device_block None: in host memory only.

    others, window: the same tokens' blocks of further full groups and of windowed groups, none where a window has
    passed.
    """

    block_hash: bytes
    device_block: int | None
    others: tuple[int, ...] = ()
    window: tuple[int, ...] = ()


def blocks_on_device(prefix: Sequence[FoundBlock]) -> list[int]:
    blocks = [found.device_block for found in prefix if found.device_block is not None]
    return blocks + [block for found in prefix for block in (*found.others, *found.window)]
