"""Publishes the KV cache's events over ZeroMQ in vLLM's form, for cache-aware routers (llm-d, Dynamo).

The engine's thread adds events to a bounded queue and never waits; a thread of its own packs and sends them. PUB frames
are [topic, sequence number of 8 bytes big endian, msgpack of [seconds, events, rank]]. A client that has missed some
asks the ROUTER at the replay endpoint, [b"", first number], and gets [b"", number, payload] of those that are kept,
and at the end number -1. Source: vLLM's published event stream (0.26).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from itertools import islice
from typing import Any

from slipstream.core.config import CacheConfig
from slipstream.core.errors import ConfigError
from slipstream.core.kv_events import DEVICE, AllCleared, BlockRemoved, BlockStored, KVEvent

logger = logging.getLogger(__name__)
MAX_QUEUED_EVENTS = 1 << 16
MAX_KEPT_BATCHES = 10_000  # for replay, as vLLM
MAX_KEPT_BYTES = 64 << 20
MAX_ASKERS = 64  # at a time; of more, the first is forgotten and gets no end
_MAX_QUEUED_BATCHES = 256  # for an asker that does not read
_PERIOD_S = 0.05
# Until subscribers have come back to an engine that has been started again: ZeroMQ tries every 0.1 s by default.
_RECONNECT_S = 1.0
_NUM_IN_BATCH = 512
_END = (-1).to_bytes(8, "big", signed=True)


def open_kv_events(config: CacheConfig, replica: int) -> KVEventPublisher | None:
    """replica: of several engines of a model; each has ports of its own, one after the other. Raises ConfigError."""
    if not config.events_endpoint:
        return None
    endpoint, replay = _of_replica(config.events_endpoint, replica), _of_replica(config.events_replay_endpoint, replica)
    return KVEventPublisher(endpoint, replay, config.events_topic, config.block_size, replica)


def _of_replica(endpoint: str, replica: int) -> str:
    address, _, port = endpoint.rpartition(":")
    if port.isdecimal():
        return f"{address}:{int(port) + replica}"
    return f"{endpoint}{replica or ''}" if endpoint else ""


class KVEventPublisher:
    """A sink of the cache. Raises ConfigError if an endpoint cannot be bound, or pyzmq or msgpack is not installed."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, block_size: int, rank: int = 0) -> None:
        try:
            import msgpack
            import zmq
        except ImportError as error:
            install = "pip install 'slipstream[kv-events]'"
            raise ConfigError("kv_events_endpoint", endpoint, f"needs {error.name}: {install}") from None
        self._pack, self._zmq = msgpack.packb, zmq
        self._topic, self._block_size, self._rank = topic.encode(), block_size, rank
        self._context = zmq.Context()
        self._publisher = self._bound(zmq.PUB, "kv_events_endpoint", endpoint)
        self._router = None
        if replay_endpoint:
            self._router = self._bound(zmq.ROUTER, "kv_events_replay_endpoint", replay_endpoint)
        self._asked: dict[bytes, int] = {}  # askers, and the next number of each
        self._queue: deque[KVEvent] = deque()
        self._is_full = False
        self._is_closed = threading.Event()
        self._told: dict[tuple[bytes, str], None] = {}  # what subscribers believe is there
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = self._number = 0
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    # ---- engine thread

    def add(self, event: KVEvent) -> None:
        if self._is_full or len(self._queue) >= MAX_QUEUED_EVENTS:
            self._is_full = True  # until the thread has told that nothing is known any more
            self.num_dropped += 1
        else:
            self._queue.append(event)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(timeout=5.0)

    # ---- own thread

    def _run(self) -> None:
        try:
            if not self._is_closed.wait(_RECONNECT_S):
                self._send(self._shown(AllCleared()))  # of an engine before this one they believe what is gone
            while not self._is_closed.wait(_PERIOD_S):
                self._send_queued()
                self._answer_replays()
        except Exception:
            logger.exception("publishing KV events failed; no more are sent")
        finally:
            self._context.destroy(linger=0)

    def _send_queued(self) -> None:
        while self._queue:
            events = [self._queue.popleft() for _ in range(min(len(self._queue), _NUM_IN_BATCH))]
            self._send([shown for event in events for shown in self._shown(event)])
        if self._is_full:  # the queue is empty, and stays so: what came since is lost, and subscribers must not believe
            logger.warning("KV events came faster than they were sent: %d are dropped", self.num_dropped)
            self._send(self._shown(AllCleared()))
            self._is_full = False

    def _shown(self, event: KVEvent) -> list[dict[str, Any]]:
        """As subscribers read it; nothing of blocks that they have never heard of."""
        if isinstance(event, AllCleared):
            removed = [_removed(block_hash, medium) for block_hash, medium in self._told]
            self._told.clear()
            return [*removed, {"type": "AllBlocksCleared"}]
        key = event.block_hash, event.medium
        if isinstance(event, BlockRemoved):
            return [_removed(*key)] if self._told.pop(key, 0) is None else []
        if not event.token_ids and (event.block_hash, DEVICE) not in self._told:  # a copy of what was not told
            return []
        self._told[key] = None
        return [self._stored(event)]

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [_as_int(event.block_hash)],
            "parent_block_hash": None if event.parent is None else _as_int(event.parent),
            "token_ids": list(event.token_ids),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": event.adapter or None,
        }

    def _send(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        payload: bytes = self._pack([time.time(), events, self._rank])
        self._publisher.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > MAX_KEPT_BATCHES or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._number += 1

    def _answer_replays(self) -> None:
        """Each asker gets what its queue holds, and the rest in later periods: nothing is skipped, nobody waits."""
        if self._router is None:
            return
        for _ in range(MAX_ASKERS):
            if not self._router.poll(0):
                break
            asker, *frames = self._router.recv_multipart()
            is_question = len(frames) == 2 and len(frames[-1]) == 8
            self._asked[asker] = int.from_bytes(frames[-1], "big") if is_question else self._number
            while len(self._asked) > MAX_ASKERS:
                del self._asked[next(iter(self._asked))]
        for asker in list(self._asked):
            try:
                self._replay(self._router, asker)
                del self._asked[asker]
            except self._zmq.Again:  # its queue is full
                continue
            except self._zmq.ZMQError as error:
                logger.info("an asker for KV events is given up: %s", error)
                del self._asked[asker]

    def _replay(self, router: Any, asker: bytes) -> None:
        """What is kept from the number that is asked for on, and the end. Raises ZMQError, with what is left in
        _asked."""
        oldest = self._number - len(self._kept)
        for number, payload in islice(self._kept, max(0, self._asked[asker] - oldest), None):
            router.send_multipart([asker, b"", number.to_bytes(8, "big"), payload])
            self._asked[asker] = number + 1
        router.send_multipart([asker, b"", _END, b""])

    def _bound(self, kind: int, field: str, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDTIMEO, 0)  # to subscribers that do not read, nothing is sent
        socket.setsockopt(self._zmq.MAXMSGSIZE, 1024)  # of questions
        if kind == self._zmq.ROUTER:
            socket.setsockopt(self._zmq.SNDHWM, _MAX_QUEUED_BATCHES)
            socket.setsockopt(self._zmq.ROUTER_MANDATORY, 1)  # else what a full queue does not take is dropped
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(field, endpoint, f"cannot be bound: {error}") from None
        return socket


def _as_int(block_hash: bytes) -> int:
    """Subscribers take integers of 64 bits; 0 means no parent to some."""
    return int.from_bytes(block_hash[-8:], "big") or 1


def _removed(block_hash: bytes, medium: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [_as_int(block_hash)], "medium": medium}
