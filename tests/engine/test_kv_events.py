"""KV events over ZeroMQ: what a subscriber believes is in the prefix cache is what is there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, make_engine, run_steps
from patience import PATIENCE_S, wait_until
from slipstream.core.control import SLEEP, Control
from slipstream.core.errors import ConfigError
from slipstream.core.kv_events import DEVICE, HOST, BlockRemoved, BlockStored
from slipstream.core.request import Request
from slipstream.engine import kv_events
from slipstream.engine.engine import Engine
from slipstream.engine.kv_events import KVEventPublisher

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")
BLOCK = 8
PROBE, PROBES = "a medium of the test", itertools.count(1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The news that nothing is cached goes out before anybody subscribes."""
    monkeypatch.setattr(kv_events, "_RECONNECT_S", 0.0)


class Router:
    """Keeps what llm-d's router would: which blocks are where, by the events alone."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.blocks: dict[str, dict[int, dict[str, Any]]] = {DEVICE: {}, HOST: {}}
        self.numbers: list[int] = []
        self.num_events = self.num_cleared = self.num_probes = 0

    def subscribe(self, publisher: KVEventPublisher) -> None:
        """Ask until something is heard: a subscription has no answer. What was heard until now does not count."""
        while not self.socket.poll(50):
            probe(publisher)
        self.hear(publisher)
        self.numbers.clear()
        self.num_events = self.num_cleared = 0

    def hear(self, publisher: KVEventPublisher) -> None:
        """All that has been added before."""
        last = probe(publisher)
        while self.num_probes < last:
            self.hear_batch()

    def hear_batch(self) -> None:
        assert self.socket.poll(1000 * PATIENCE_S), "nothing is heard"
        _, number, payload = self.socket.recv_multipart()
        self.numbers.append(int.from_bytes(number, "big"))
        self.take(payload)

    def take(self, payload: bytes) -> None:
        at, events, _ = msgpack.unpackb(payload)
        assert abs(time.time() - at) < 10 * PATIENCE_S
        for event in events:
            if event.get("medium") == PROBE:
                [self.num_probes] = event["block_hashes"]
                continue
            self.num_events += 1
            if event["type"] == "AllBlocksCleared":
                self.num_cleared += 1
            elif event["type"] == "BlockRemoved":
                del self.blocks[event["medium"]][event["block_hashes"][0]]
            else:
                parent = event["parent_block_hash"]
                assert event["medium"] == HOST or parent is None or parent in self.blocks[DEVICE], "out of order"
                self.blocks[event["medium"]][event["block_hashes"][0]] = event

    def prompts(self) -> set[tuple[int, ...]]:
        """The token ids of whole chains, as a router would look a prompt up."""
        chains: dict[int, tuple[int, ...]] = {}
        for block_hash, event in self.blocks[DEVICE].items():
            before = chains.get(event["parent_block_hash"], ())
            chains[block_hash] = (*before, *event["token_ids"])
        return set(chains.values())


def probe(publisher: KVEventPublisher) -> int:
    """Publish the hash that is returned, of a block that is not kept: what is added before is heard before it."""
    number = next(PROBES)
    publisher.add(BlockStored(number.to_bytes(8, "big"), None, [1], PROBE))
    publisher.add(BlockRemoved(number.to_bytes(8, "big"), PROBE))
    return number


def publisher_of(engine: Engine) -> KVEventPublisher:
    assert engine._events is not None
    return engine._events


@contextmanager
def heard(folder: Path, checkpoint: Path, **settings: Any) -> Iterator[tuple[Engine, Router]]:
    cache = {"events_endpoint": f"ipc://{folder}/events", "events_topic": "kv@pod@llm", **settings}
    engine, router = make_engine(checkpoint, {"max_model_len": 128}, cache), Router(f"ipc://{folder}/events", "kv@pod@")
    try:
        router.subscribe(publisher_of(engine))
        yield engine, router
    finally:
        engine.close()
        router.socket.close(linger=0)


def ask(engine: Engine, prompt: list[int], **fields: Any) -> None:
    engine.submit(Request(prompt, GREEDY, **fields))
    run_steps(engine, {})
    assert engine.error is None


def hashes(engine: Engine) -> set[int]:
    return {kv_events._as_int(block_hash) for block_hash in engine.scheduler.cache.pool._block_of}


def test_a_subscriber_knows_what_is_cached(tiny_llama: Path, tmp_path: Path) -> None:
    with heard(tmp_path, tiny_llama, num_blocks=16) as (engine, router):
        first = list(range(5, 5 + 3 * BLOCK))
        ask(engine, first)
        router.hear(publisher_of(engine))
        assert hashes(engine) == set(router.blocks[DEVICE]) and tuple(first) in router.prompts()
        event = next(iter(router.blocks[DEVICE].values()))
        assert event["block_size"] == BLOCK and event["parent_block_hash"] is None and event["lora_name"] is None
        for start in range(30, 300, 30):  # more than fits: blocks are evicted
            ask(engine, list(range(start, start + 3 * BLOCK)))
        router.hear(publisher_of(engine))
        assert hashes(engine) == set(router.blocks[DEVICE]) and tuple(first) not in router.prompts()
        assert router.numbers == list(range(router.numbers[0], router.numbers[0] + len(router.numbers)))


def test_copies_in_host_memory(tiny_llama: Path, tmp_path: Path) -> None:
    with heard(tmp_path, tiny_llama, num_blocks=16, host_memory_bytes=1 << 20) as (engine, router):
        for start in range(5, 200, 30):
            ask(engine, list(range(start, start + 3 * BLOCK)))
        ask(engine, list(range(5, 5 + 3 * BLOCK)))
        router.hear(publisher_of(engine))
        assert hashes(engine) == set(router.blocks[DEVICE])
        host = engine.scheduler.cache.host
        assert host is not None and host.num_loaded > 0
        assert set(router.blocks[HOST]) == {kv_events._as_int(block_hash) for block_hash in host._block_of}


def test_salted_prompts_are_nobody_s_to_know(tiny_llama: Path, tmp_path: Path) -> None:
    with heard(tmp_path, tiny_llama) as (engine, router):
        ask(engine, list(range(5, 5 + 3 * BLOCK)), prefix_key=b"a tenant's salt")
        router.hear(publisher_of(engine))
        assert hashes(engine) and not router.blocks[DEVICE] and not router.num_events


def test_a_sleep_clears_all(tiny_llama: Path, tmp_path: Path) -> None:
    with heard(tmp_path, tiny_llama) as (engine, router):
        ask(engine, list(range(5, 5 + 3 * BLOCK)))
        order = engine.post(Control(SLEEP))
        run_steps(engine, {})
        order.wait()
        router.hear(publisher_of(engine))
        assert not router.blocks[DEVICE] and router.num_cleared == 1


def test_what_was_missed_can_be_asked_for(tiny_llama: Path, tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    with heard(tmp_path, tiny_llama, events_replay_endpoint=replay) as (engine, router):
        for start in (5, 40, 80):
            ask(engine, list(range(start, start + 3 * BLOCK)))
            router.hear(publisher_of(engine))
        asking = zmq.Context.instance().socket(zmq.DEALER)
        asking.connect(replay)
        late = Router("ipc:///dev/null")
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        numbers = []
        while True:
            assert asking.poll(1000 * PATIENCE_S), "no answer"
            _, number, payload = asking.recv_multipart()
            numbers.append(int.from_bytes(number, "big", signed=True))
            if numbers[-1] < 0:
                break
            late.take(payload)
        assert (
            numbers == [*range(router.numbers[-1] + 1), -1] and late.num_cleared == 1 and late.blocks == router.blocks
        )
        asking.send(b"nonsense")
        asking.send_multipart([b"", b"x" * 100])
        assert asking.poll(1000 * PATIENCE_S), "what is no question has no harm, and an end"
        asking.close(linger=0)


def test_an_asker_gets_all_that_is_kept_however_much(tmp_path: Path) -> None:
    """Many times what a queue of ZeroMQ holds, beside an asker that does not read and one that is gone."""
    replay, number = f"ipc://{tmp_path}/replay", 5000
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", replay, "", BLOCK)
    wait_until(lambda: len(publisher._kept) == 1, "the news that nothing is cached")
    for index in range(1, number):  # the thread's queue stays empty meanwhile
        publisher._send(publisher._shown(BlockStored(index.to_bytes(16, "big"), None, list(range(64)), DEVICE)))
    askers = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(3)]
    for asker in askers:
        asker.setsockopt(zmq.RCVHWM, 1)
        asker.connect(replay)
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
    _, asking, gone = askers
    assert gone.poll(1000 * PATIENCE_S)
    gone.close(linger=0)
    numbers = []
    while not numbers or numbers[-1] >= 0:
        assert asking.poll(1000 * PATIENCE_S), f"nothing comes after {numbers[-1:]}"
        numbers.append(int.from_bytes(asking.recv_multipart()[1], "big", signed=True))
    assert numbers == [*range(number), -1]
    wait_until(lambda: len(publisher._asked) == 1, "only the one that does not read is left")
    publisher.close()
    for asker in askers:
        asker.close(linger=0)


def test_events_that_come_too_fast_leave_no_wrong_belief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_QUEUED_EVENTS", 50)
    publisher = kv_events.KVEventPublisher(f"ipc://{tmp_path}/events", "", "", BLOCK)
    router = Router(f"ipc://{tmp_path}/events")
    router.subscribe(publisher)
    waits, may_send, send = threading.Event(), threading.Event(), publisher._send_queued

    def send_later() -> None:
        waits.set()
        assert may_send.wait(PATIENCE_S)
        send()

    monkeypatch.setattr(publisher, "_send_queued", send_later)
    assert waits.wait(PATIENCE_S)
    for number in range(1000, 1200):
        publisher.add(BlockStored(number.to_bytes(16, "big"), None, [1], DEVICE))
    may_send.set()
    while not router.num_cleared:
        router.hear_batch()
    assert router.num_cleared == 1 and not router.blocks[DEVICE] and publisher.num_dropped == 150
    wait_until(lambda: not publisher._is_full, "room for more")
    publisher.add(BlockStored(b"x" * 16, None, [1], DEVICE))
    router.hear(publisher)
    assert len(router.blocks[DEVICE]) == 1
    publisher.close()
    router.socket.close(linger=0)


def test_replicas_have_ports_of_their_own(tiny_llama: Path) -> None:
    assert kv_events._of_replica("tcp://127.0.0.1:5557", 2) == "tcp://127.0.0.1:5559"
    assert kv_events._of_replica("ipc:///run/kv", 0) == "ipc:///run/kv"
    with pytest.raises(ConfigError, match=r"kv_events_endpoint='tcp://203.0.113.1:5557': cannot be bound"):
        make_engine(tiny_llama, cache={"events_endpoint": "tcp://203.0.113.1:5557"})


def test_an_engine_that_is_started_again_tells_that_its_cache_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscribers come back by themselves, with what they believe."""
    endpoint, block = f"ipc://{tmp_path}/events", BlockStored(b"x" * 16, None, [1], DEVICE)
    publisher, router = kv_events.KVEventPublisher(endpoint, "", "", BLOCK), Router(endpoint)
    router.subscribe(publisher)
    publisher.add(block)
    router.hear(publisher)
    publisher.close()
    assert len(router.blocks[DEVICE]) == 1 and not router.num_cleared
    router.numbers.clear()
    monkeypatch.setattr(kv_events, "_RECONNECT_S", 3.0)  # of which the subscriber needs some tenths on an idle machine
    publisher = kv_events.KVEventPublisher(endpoint, "", "", BLOCK)
    publisher.add(block)
    router.hear_batch()
    assert router.num_cleared == 1 and router.numbers == [0], "before any block"
    publisher.close()
