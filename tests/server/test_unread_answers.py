"""Answers that their clients do not read: a worker keeps a total of them, and a connection one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until
from slipstream.server import connection_pool
from slipstream.server.backlog import READER, Backlog
from slipstream.server.connection_pool import ConnectionPool
from starlette.types import Message

PIECE, REPEAT = "x" * 60_000, 150
ANSWER_BYTES = len(PIECE) * REPEAT  # more than twice what the kernel keeps of it
LIMIT = 3 * ANSWER_BYTES
BODY = json.dumps({"model": "plain", "prompt": json.dumps({"pieces": [PIECE], "repeat": REPEAT})}).encode()
ASKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ASKED += b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def bounded(fake_triton: FakeTriton) -> Iterator[GatewayProcess]:
    with GatewayProcess(fake_triton.url, ["--max-total-answer-bytes", str(LIMIT)]) as running:
        yield running


def connect(gateway: GatewayProcess) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", gateway.port))
    return connection


def read(connection: socket.socket, num_answers: int = 1) -> int:
    """Bytes of the answers, heads included, or up to a reset."""
    end = b'"total_tokens":'
    num_bytes, num_ends, tail = 0, 0, b""
    with contextlib.suppress(ConnectionError):
        while num_ends < num_answers and (part := connection.recv(1 << 20)):
            seen = tail + part
            num_bytes, num_ends, tail = num_bytes + len(part), num_ends + seen.count(end), seen[-len(end) + 1 :]
    return num_bytes


def refused(gateway: GatewayProcess) -> float:
    return gateway.metrics().get('slipstream_gateway_refused_total{reason="max_total_answer_bytes",key=""}', 0.0)


def test_answers_that_nobody_reads_give_way_and_those_that_are_read_do_not(bounded: GatewayProcess) -> None:
    process = psutil.Process(bounded.process.pid)
    with connect(bounded) as connection:  # what the first one allocates is no attack's
        connection.sendall(ASKED)
        assert read(connection) > ANSWER_BYTES
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(bounded)) for _ in range(24)]
        for number, connection in enumerate(silent):
            connection.sendall(ASKED)
            if number % 8 == 7:
                with connect(bounded) as other:
                    other.sendall(ASKED)
                    assert read(other) > ANSWER_BYTES
        wait_until(lambda: refused(bounded) >= 20, "answers to give way")
        # at once less than half of what was asked for; what has given way is freed a moment later
        assert process.memory_info().rss - before < LIMIT + 8 * ANSWER_BYTES
        wait_until(lambda: process.memory_info().rss - before < LIMIT + 4 * ANSWER_BYTES, "memory to be freed")
        assert sum(read(connection) > ANSWER_BYTES for connection in silent) in (1, 2, 3)


def test_the_next_answer_of_a_connection_waits_until_the_last_is_read(
    bounded: GatewayProcess, fake_triton: FakeTriton
) -> None:
    num_asked = len(fake_triton.requests)
    with connect(bounded) as connection:
        connection.sendall(ASKED)
        wait_until(lambda: len(fake_triton.requests) == num_asked + 1, "the first request")
        assert connection.recv(1000, socket.MSG_PEEK)
        connection.sendall(ASKED + ASKED)
        with connect(bounded) as other:
            other.sendall(ASKED)
            assert read(other) > ANSWER_BYTES
        assert len(fake_triton.requests) == num_asked + 2
        assert read(connection, 3) > 3 * ANSWER_BYTES
    assert len(fake_triton.requests) == num_asked + 4


@dataclass(eq=False)
class Silent:
    num_unread_bytes: int
    num_read_bytes: int = 0
    address: str = "a"
    num_kept_bytes: int = 0
    num_body_bytes: int = 0

    def may_give_way(self) -> bool:
        return False

    def give_way(self, reason: str) -> None: ...

    def stop_sending(self, reason: str) -> None: ...


def test_what_would_be_read_last_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(connection_pool.time, "monotonic", lambda: now[0])
    pool, mib = ConnectionPool(), 1 << 20
    large, small, slow, fast, late = (Silent(size * mib) for size in (30, 10, 20, 20, 15))
    for connection in (large, small, slow, fast, late):
        assert not pool.mark_unread(connection, 100 * mib)
        now[0] += 3.0
    slow.num_unread_bytes, fast.num_unread_bytes = 19 * mib, mib
    slow.num_read_bytes, fast.num_read_bytes = mib, 19 * mib
    assert pool.mark_unread(Silent(50 * mib), 100 * mib) == [large, small]
    alone = ConnectionPool()
    assert not alone.mark_unread(Silent(1000), 100), "the newest never gives way"


@dataclass
class Slow:
    """A client: what is sent to it, once it reads."""

    is_behind: bool = False
    num_kept: int = 0
    parts: list[bytes] = field(default_factory=list)
    room: asyncio.Event = field(default_factory=asyncio.Event)

    def keep(self, num_bytes: int) -> None:
        self.num_kept += num_bytes

    async def send(self, message: Message) -> None:
        if self.is_behind:
            await self.room.wait()
        self.parts.append(message["body"])


def part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_events_for_a_client_that_is_behind_wait_in_order_and_in_one_piece() -> None:
    async def run() -> None:
        client = Slow()
        backlog = Backlog(client.send, {"extensions": {READER: client}})
        await backlog(part(b"a"))
        assert (client.parts, client.num_kept) == ([b"a"], 0)
        client.is_behind = True
        for data in (b"b", b"c", b"d"):
            await asyncio.wait_for(backlog(part(data)), PATIENCE_S)
            await asyncio.sleep(0)
        assert (client.parts, client.num_kept) == ([b"a"], 3)
        last = asyncio.create_task(backlog(part(b"e", more=False)))
        await asyncio.sleep(0)
        assert not last.done()
        client.room.set()
        await asyncio.wait_for(last, PATIENCE_S)
        assert (client.parts, client.num_kept) == ([b"a", b"b", b"cd", b"e"], 0)

    asyncio.run(run())


def test_a_client_that_leaves_is_kept_nothing_for() -> None:
    async def run() -> None:
        client = Slow(is_behind=True)
        backlog = Backlog(client.send, {"extensions": {READER: client}})
        await backlog(part(b"a"))
        await asyncio.sleep(0)
        backlog.end()
        await asyncio.sleep(0)
        assert (client.parts, client.num_kept) == ([], 0)

    asyncio.run(run())


def test_a_stream_is_read_from_triton_at_its_pace_and_its_client_from_us(
    bounded: GatewayProcess, fake_triton: FakeTriton
) -> None:
    """12 MB, of which the kernel takes some: the rest waited in Triton, without a bound."""
    script = {"pieces": ["Z" * 60_000], "repeat": 200}
    body = json.dumps({"model": "plain", "prompt": json.dumps(script), "stream": True}).encode()
    head = ASKED.partition(b"content-length")[0] + b"content-length: %d\r\n\r\n" % len(body)
    num_read, tail = 0, b""
    with connect(bounded) as connection:
        num_before = fake_triton.num_answered
        connection.sendall(head + body)
        wait_until(lambda: fake_triton.num_answered > num_before, "the model's stream, which waits for nobody")
        while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and (read := connection.recv(1 << 20)):
            num_read, tail = num_read + read.count(b"Z"), (tail + read)[-40:]
    assert num_read == 60_000 * 200
