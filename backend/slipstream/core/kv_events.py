"""What happens to the contents of the KV cache, for routers that send requests to where their prefix is.

Engine thread. The cache tells a sink; engine/kv_events.py publishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

DEVICE, HOST = "GPU", "CPU"  # vLLM's names of the media


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block can be found from now on. parent: None for a prompt's first block. token_ids: none of a copy."""

    block_hash: bytes
    parent: bytes | None
    token_ids: Sequence[int]
    medium: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hash: bytes
    medium: str


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllCleared


class KVEventSink(Protocol):
    def add(self, event: KVEvent) -> None:
        """Must not wait."""
        ...
