"""Bodies of very many values are read by a process of their own, whose answers are those of a worker."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psutil
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until
from slipstream.server.body_cost import reading_us
from slipstream.server.guard import MAX_READING_US
from slipstream.server.handover import BusyError, give, make_queue, take
from slipstream.server.reader import Reader

CHAT = "/v1/chat/completions"
DEAR = [""] * 12_000
HEADERS = {"content-type": "application/json", "authorization": "Bearer sk-a"}
PER_MINUTE = 40


@pytest.fixture(scope="module")
def keyed(fake_triton: FakeTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    a = {"name": "a", "key": "sk-a", "requests_per_minute": PER_MINUTE}
    file.write_text(json.dumps({"keys": [a, {"name": "b", "key": "sk-b", "max_num_seqs": 1}]}))
    with GatewayProcess(fake_triton.url, ["--api-key-file", str(file), "--max-body-bytes", str(1 << 20)]) as running:
        yield running


def body_of(script: dict[str, Any], **fields: Any) -> bytes:
    turns = [{"role": "user", "content": json.dumps(script)}]
    return json.dumps({"model": "plain", "messages": turns, "dear": DEAR, **fields}).encode()


def connect(gateway: GatewayProcess) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)


def post(gateway: GatewayProcess, body: Any, path: str = CHAT, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = connect(gateway)
    with closing(connection):
        connection.request("POST", path, body, {**HEADERS, **headers})
        reply = connection.getresponse()
        return reply, reply.read().decode()


def readers(gateway: GatewayProcess) -> list[psutil.Process]:
    """The children that multiprocessing has started for a task."""
    children = psutil.Process(gateway.process.pid).children()
    return [child for child in children if "multiprocessing.spawn" in " ".join(child.cmdline())]


def test_text_is_cheap_and_values_are_dear() -> None:
    text = json.dumps({"content": 'if (a["x"] == "\\n") { b = "{}"; }\n' * 10_000}).encode()
    assert len(text) > 400_000 and reading_us(text) < MAX_READING_US
    many = dict.fromkeys(map(str, range(20_000)))
    numbers = [1] * 400_000, [10**4299] * 500, [1.2345678901234567e-300] * 100_000
    for dear in ([{"type": "text", "text": ""}] * 10_000, [[]] * 100_000, *numbers, many):
        assert reading_us(json.dumps(dear).encode()) > MAX_READING_US


def test_empty_parts_behind_a_body_that_has_been_read_refuse_nothing() -> None:
    """The last part of a body in chunks: with many of them, the other process is gone before some are sent."""
    giving, taking = make_queue()
    client, peer = socket.socketpair()

    async def taken() -> bytes:
        found = None
        while found is None:
            found = await take(taking)
        found[0].close()
        return found[1]

    with closing(giving), closing(taking), closing(client), closing(peer), ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: asyncio.run(taken()))
        asyncio.run(give(giving, client, [b"GET /", *[b""] * 100_000]))
        assert other.result(PATIENCE_S) == b"GET /"


def test_without_a_file_left_the_reader_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async def hand_over() -> None:
        monkeypatch.setattr(socket, "socketpair", none_left)  # not before: the event loop has a pair of its own
        await give(giving, taking, [b"GET /"])

    giving, taking = make_queue()
    with closing(giving), closing(taking), pytest.raises(BusyError):
        asyncio.run(hand_over())


class FakeProcess:
    """A reader's process, which serves nothing. num_starts: of all of a class."""

    pid, exitcode, num_starts = 1, 0, 0

    def start(self) -> None:
        type(self).num_starts += 1

    def is_alive(self) -> bool:
        return True

    join = terminate = kill = lambda *_: None


def test_a_reader_that_cannot_be_started_is_started_later() -> None:
    giving, taking = make_queue()
    has_started = threading.Event()

    class Process(FakeProcess):
        def start(self) -> None:
            super().start()
            if Process.num_starts == 1:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")  # no process is free
            has_started.set()

    with closing(giving), closing(taking):
        reader = Reader(taking, Process)  # type: ignore[arg-type]
        giving.send(b"x")
        assert has_started.wait(PATIENCE_S)
        reader.end(0.0)


def test_what_was_given_to_a_reader_that_died_is_served_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.server.reader._CHECK_S", PATIENCE_S)  # the pause before a second start
    giving, taking = make_queue()
    has_died = threading.Event()

    class Process(FakeProcess):
        exitcode = -9

        def is_alive(self) -> bool:
            has_died.set()
            return False

    with closing(giving), closing(taking):
        reader = Reader(taking, Process)  # type: ignore[arg-type]
        giving.send(b"x")
        assert has_died.wait(PATIENCE_S)
        reader.end(0.0)
        assert Process.num_starts == 2


def test_answers_are_those_of_a_worker(keyed: GatewayProcess) -> None:
    assert not readers(keyed)
    reply, text = post(keyed, body_of({"pieces": ["Hel", "lo"]}), **{"x-request-id": "mine"})
    assert reply.status == 200 and json.loads(text)["choices"][0]["message"]["content"] == "Hello"
    assert (reply.getheader("x-request-id"), reply.getheader("connection")) == ("mine", "close")
    assert "dear" in (reply.getheader("warning") or "") and len(readers(keyed)) == 1
    reply, text = post(keyed, body_of({"pieces": ["Hel", "lo"]}, stream=True))
    assert reply.status == 200 and text.count('"content":"') == 3 and text.endswith("data: [DONE]\n\n")
    reply, text = post(keyed, body_of({}, temperature="warm"))
    assert reply.status == 400 and json.loads(text)["error"]["param"] == "temperature"
    reply, text = post(keyed, body_of({}), authorization="Bearer sk-c")
    assert reply.status == 401


def test_a_body_in_chunks_and_one_that_is_asked_for(keyed: GatewayProcess) -> None:
    body = body_of({"pieces": ["x"]})
    reply, text = post(keyed, (body[start : start + 5000] for start in range(0, len(body), 5000)))
    assert reply.status == 200, text
    head = f"POST {CHAT}?a=b HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items()) + "\r\n"
    with closing(socket.create_connection(("127.0.0.1", keyed.port), timeout=PATIENCE_S)) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body + b"GET /health HTTP/1.1\r\n\r\n")  # the next one is not answered: the first one closes
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_a_connection_that_was_used_before(keyed: GatewayProcess) -> None:
    with closing(connect(keyed)) as connection:
        for body in (b'{"model": "plain", "messages": 1}', body_of({}, messages=1)):
            connection.request("POST", CHAT, body, HEADERS)
            assert connection.getresponse().read().startswith(b'{"error"')


def test_what_comes_behind_a_request_does_not_end_its_answer(keyed: GatewayProcess) -> None:
    """A worker reads at most 256 KiB at once, and then no more of a request that waits for another's answer."""
    body, more = body_of({"pieces": ["x"]}), b"a" * (400 << 10)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n" + "".join(f"{k}: {v}\r\n" for k, v in HEADERS.items())
    requests = b"".join(f"{head}content-length: {len(one)}\r\n\r\n".encode() + one for one in (body, more))
    with closing(socket.create_connection(("127.0.0.1", keyed.port), timeout=PATIENCE_S)) as connection:
        connection.sendall(requests)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_workers_share_a_reader(fake_gateway: GatewayProcess) -> None:
    headers = {"authorization": "Bearer sk-right"}
    for _ in range(6):
        assert post(fake_gateway, body_of({"pieces": ["x"]}, more=30 * DEAR), **headers)[0].status == 200
    assert len(readers(fake_gateway)) == 2 + 1


def test_a_request_counts_once(keyed: GatewayProcess) -> None:
    before = keyed.metrics()
    reply, _ = post(keyed, body_of({"pieces": ["x"]}), **{"x-request-id": "once"})
    left = int(reply.getheader("x-ratelimit-remaining-requests") or 0)
    reply, _ = post(keyed, body_of({"pieces": ["x"]}))
    assert left - int(reply.getheader("x-ratelimit-remaining-requests") or 0) == 1
    wait_until(lambda: keyed.log.count("id=once ") == 1, "its line in the log")
    name = 'slipstream_gateway_requests_total{endpoint="chat",status="200"}'
    wait_until(lambda: keyed.metrics()[name] - before.get(name, 0) == 2, "both to be counted")
    assert keyed.metrics()["slipstream_gateway_requests_in_flight"] == 1  # this one


def test_a_client_that_leaves_cancels_its_request(keyed: GatewayProcess, fake_triton: FakeTriton) -> None:
    fake_triton.cancelled.clear()
    connection = connect(keyed)
    connection.request("POST", CHAT, body_of({"pieces": ["x"], "hang": True}, stream=True), HEADERS)
    assert connection.getresponse().status == 200
    connection.sock.close() if connection.sock else connection.close()
    assert fake_triton.cancelled.wait(PATIENCE_S)


def test_a_reader_that_died_is_started_again_and_ends_with_its_gateway(keyed: GatewayProcess) -> None:
    """At once, since until then what it had under way counts."""
    key = {"authorization": "Bearer sk-b"}
    small = json.dumps({"model": "plain", "messages": [{"role": "user", "content": '{"pieces": ["x"]}'}]})
    with closing(connect(keyed)) as connection:
        connection.request("POST", CHAT, body_of({"pieces": ["x"], "hang": True}, stream=True), {**HEADERS, **key})
        streamed = connection.getresponse()  # whose end is that of the connection
        assert (streamed.status, post(keyed, small, **key)[0].status) == (200, 429)
        readers(keyed)[0].kill()
        wait_until(lambda: post(keyed, small, **key)[0].status == 200, "its sequence to end")
    readers(keyed)[0].kill()
    assert post(keyed, body_of({"pieces": ["x"]}))[0].status == 200
    [reader] = readers(keyed)
    keyed.process.send_signal(signal.SIGKILL)
    keyed.process.wait(PATIENCE_S)
    wait_until(lambda: _has_ended(reader), "the reader's end")


@pytest.mark.parametrize("has_started", [True, False])
def test_what_is_there_when_the_gateway_ends_is_answered(fake_triton: FakeTriton, has_started: bool) -> None:
    """What waits for the reader, also for one that still starts, and a body whose end comes when that takes no more.

    The reader gets what a terminal sends to all processes at Ctrl-C, too."""
    body = body_of({"pieces": ["x"]})
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\n\r\n"
    with GatewayProcess(fake_triton.url) as gateway, ExitStack() as stack:
        assert not has_started or post(gateway, body)[0].status == 200
        address = "127.0.0.1", gateway.port
        late, *waiting = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S)) for _ in range(4)]
        late.sendall(head.encode() + body[:1000])
        if not has_started:
            waiting[0].sendall(head.encode() + body)
            wait_until(lambda: bool(readers(gateway)), "the reader's start")
        [reader] = readers(gateway)
        reader.suspend()
        for connection in waiting[not has_started :]:
            connection.sendall(head.encode() + body)
        owner = psutil.Process(gateway.process.pid)
        wait_until(lambda: _num_connections(owner, gateway.port) == 1, "the others to be handed over")
        gateway.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Shutting down" in gateway.log, "its end")
        if not has_started:
            reader.send_signal(signal.SIGINT)
        reader.resume()
        wait_until(lambda: _has_ended(reader), "the reader's end")
        late.sendall(body[1000:])
        for connection in (*waiting, late):
            answer = b"".join(iter(lambda: connection.recv(65536), b""))  # noqa: B023
            assert answer.startswith(b"HTTP/1.1 200")


def _has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _num_connections(process: psutil.Process, port: int) -> int:
    found = process.net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)
