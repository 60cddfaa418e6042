"""Requests too large to be kept: refused while they arrive, and the gateway's memory stays what it was.

Raw sockets, because no client library would send such requests. RSS is that of the gateway's process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Iterator

import psutil
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until

HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHAT = POST.replace(b"completions", b"chat/completions")
MOST_GROWTH_BYTES = 8 << 20
LIMITS = ["--max-total-header-bytes", str(1 << 20), "--max-total-body-bytes", str(4 << 20), "--max-connections", "200"]


@pytest.fixture(scope="module")
def bounded(fake_triton: FakeTriton) -> Iterator[GatewayProcess]:
    with GatewayProcess(fake_triton.url, [*LIMITS, "--log-level", "error"]) as running:
        for _ in range(50):  # what the first requests allocate is no attack's
            assert running.get("/v1/models")[0] == 200
        yield running


def connect(gateway: GatewayProcess, client: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S, source_address=(client, 0))


def refusals(gateway: GatewayProcess) -> dict[str, float]:
    """By reason."""
    start = "slipstream_gateway_refused_total{reason="
    return {name[len(start) :].split('"')[1]: n for name, n in gateway.metrics().items() if name.startswith(start)}


def rss(gateway: GatewayProcess) -> int:
    return psutil.Process(gateway.process.pid).memory_info().rss


def attack(connection: socket.socket, pieces: Iterable[bytes]) -> tuple[int, int, bytes]:
    """Send until cut off: (bytes sent, status of the answer or 0, its body)."""
    num_sent, answer = 0, b""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
            num_sent += len(piece)
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return num_sent, int(head.split()[1]) if head else 0, body


def filler(num_bytes: int) -> Iterator[bytes]:
    for _ in range(num_bytes >> 16):
        yield b"a" * (1 << 16)


def many_headers(num_bytes: int) -> Iterator[bytes]:
    line = b"x-filler: " + b"a" * 1000 + b"\r\n"
    for _ in range(num_bytes // (64 * len(line))):
        yield 64 * line


ATTACKS = {
    "many headers": (HEAD, many_headers(200 << 20), 431),
    "one header": (HEAD + b"x-long: ", filler(200 << 20), 431),
    "a header's name": (HEAD, filler(50 << 20), 431),
    "a url": (b"GET /", filler(50 << 20), 414),
    "a query": (b"GET /health?", filler(50 << 20), 414),
    "a method": (b"", filler(1 << 20), 400),
    "empty lines": (b"", (b"\r\n" * 30_000 for _ in range(100)), 431),
    "trailers": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", many_headers(50 << 20), 431),
    "one trailer": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ", filler(50 << 20), 431),
    "a chunk's extension": (POST + b"transfer-encoding: chunked\r\n\r\n1;x=", filler(50 << 20), 431),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_heads_without_end(bounded: GatewayProcess, name: str) -> None:
    head, pieces, status = ATTACKS[name]
    before = rss(bounded)
    with connect(bounded) as connection:
        connection.sendall(head)
        num_sent, answered, body = attack(connection, pieces)
        assert rss(bounded) - before < MOST_GROWTH_BYTES, "kept, while the connection is open"
    assert answered in (status, 0), (answered, body)  # 0: a reset overtook the answer, as TCP does while one sends
    if body:
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error" and (status == 400 or "accepted: at most" in error["message"])
    assert num_sent < 20 << 20, "what the kernel's buffers hold, and no more"
    assert bounded.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEAD + b"x: " + b"a" * 60_000 + b"\r\n\r\n", 200),
        (HEAD + b"x: " + b"a" * 65_536 + b"\r\n\r\n", 431),
        (HEAD + b"x: 1\r\n" * 98 + b"\r\n", 200),
        (HEAD + b"x: 1\r\n" * 100 + b"\r\n", 431),
        (b"GET /health?" + b"a" * 8000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
        (b"GET /health?" + b"a" * 8200 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414),
        (b"\x00\x01\x02\r\n\r\n", 400),
    ],
)
def test_what_is_accepted_and_what_is_said(bounded: GatewayProcess, request_bytes: bytes, status: int) -> None:
    """Whole requests, which need no more than is sent: nothing cuts the answer off."""
    with connect(bounded) as connection:
        connection.sendall(request_bytes)
        answer = connection.recv(65536)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
        if status != 200:
            assert b"content-type: application/json" in answer and b"connection: close" in answer
            while part := connection.recv(65536):
                answer += part
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(bounded: GatewayProcess) -> None:
    body = json.dumps({"model": "plain", "prompt": json.dumps({"pieces": ["a", "b"]}), "stream": True}).encode()
    with connect(bounded) as connection:
        connection.sendall(POST.replace(b"1.1", b"1.0") + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"200 OK" in head and b"connection: close" in head and b"transfer-encoding" not in head
    assert events.startswith(b"data: {") and events.endswith(b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_a_request_that_asks_for_another_protocol_is_answered(bounded: GatewayProcess, protocol: str) -> None:
    """As curl --http2 sends it. Its body comes with its head, behind it, in chunks, and with the next request."""
    body = json.dumps({"model": "plain", "prompt": '{"pieces": ["ok"]}'}).encode()
    upgrade = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {protocol}\r\nhttp2-settings: AAMAAABk\r\n".encode()
    head = POST + upgrade + b"content-length: %d\r\n\r\n" % len(body)
    in_chunks = POST + upgrade + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    whole, last = head + body, (head + body).replace(b"Upgrade, ", b"Upgrade, close, ")
    in_pieces = [head[:90], head[90:], body[:5], body[5:]]
    for pieces in ([last], [whole, last], [*in_pieces, last], [in_chunks, last], [whole + in_chunks + last]):
        num_asked = b"".join(pieces).count(b"POST ")
        with connect(bounded) as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)  # or it is one packet
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'"text":"ok"') == num_asked, answer


def test_headers_of_all_connections_together(bounded: GatewayProcess) -> None:
    """Each is within its own limit; the gateway keeps 1 MiB of all. It serves again when they have gone."""
    before = rss(bounded)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(bounded)) for _ in range(100)]
        for connection in connections:
            connection.sendall(HEAD + b"x: " + b"a" * 50_000 + b"\r\n")
        wait_until(lambda: any_answer(connections, b" 503 "), "a refusal")
        assert rss(bounded) - before < 2 * MOST_GROWTH_BYTES
    wait_until(lambda: bounded.get("/health")[0] == 200, "room again")


def test_slow_heads_do_not_shut_others_out(bounded: GatewayProcess) -> None:
    """40 heads of 50 kB that never end, where 1 MiB is kept of all; beside them a body that is sent slowly."""
    body = json.dumps({"model": "plain", "prompt": '{"pieces": ["ok"]}'}).encode()
    long = HEAD + b"x: " + b"a" * 60_000 + b"\r\n\r\n"
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(connect(bounded))
        honest.sendall(POST + f"content-length: {len(body)}\r\n\r\n".encode() + body[:10])
        for _ in range(40):
            slow = stack.enter_context(connect(bounded, "127.0.0.2"))
            slow.sendall(HEAD + b"x: " + b"a" * 50_000 + b"\r\n")
        for _ in range(5):
            with connect(bounded) as connection:
                connection.sendall(long)
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 "), "somebody else's head has to go"
        honest.sendall(body[10:])
        assert honest.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert refusals(bounded)["max_total_header_bytes"] > 0


def test_slow_connections_do_not_shut_others_out(bounded: GatewayProcess) -> None:
    """220 connections of one address that ask nothing, where 200 may be open; a slow one of another is there first."""
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(connect(bounded))
        honest.sendall(HEAD)
        idle = stack.enter_context(connect(bounded, "127.0.0.2"))
        idle.sendall(HEAD + b"\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200 "), "answered: before that it may not be closed for others"
        for _ in range(220):
            stack.enter_context(connect(bounded, "127.0.0.2"))
        for _ in range(5):
            assert bounded.get("/health")[0] == 200
        honest.sendall(b"\r\n")
        assert honest.recv(65536).startswith(b"HTTP/1.1 200 ")
        while idle.recv(65536):
            pass  # the end: the idle one has gone first
    assert refusals(bounded)["max_connections"] > 0


def test_each_refusal_is_counted_by_its_limit(bounded: GatewayProcess) -> None:
    requests = {
        "max_header_bytes": HEAD + b"x: " + b"a" * 65_536 + b"\r\n\r\n",
        "max_headers": HEAD + b"x: 1\r\n" * 100 + b"\r\n",
        "max_url_bytes": b"GET /health?" + b"a" * 8200 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "malformed": b"\x00\x01\x02\r\n\r\n",
        "allowed_host": b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n",
        "max_body_bytes": POST + b"content-length: 99999999\r\n\r\n",
    }
    for reason, sent in requests.items():
        before = refusals(bounded).get(reason, 0)
        with connect(bounded) as connection:
            connection.sendall(sent)
            assert connection.recv(65536).startswith(b"HTTP/1.1 4")
        assert refusals(bounded)[reason] == before + 1, reason


def any_answer(connections: list[socket.socket], sign: bytes) -> bool:
    for connection in connections:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if sign in connection.recv(65536):
                return True
    return False


def test_bodies_of_all_connections_together(bounded: GatewayProcess) -> None:
    """Ten bodies that are never finished, each within its own limit of 4 MiB; 4 MiB are kept of all."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(bounded)) for _ in range(10)]
        before = rss(bounded)
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(POST + b"content-length: 2000000\r\n\r\n" + b" " * 1_000_000)
        wait_until(lambda: any_answer(connections, b" 503 "), "a refusal")
        assert rss(bounded) - before < 4 * MOST_GROWTH_BYTES
    wait_until(lambda: bounded.get("/v1/models")[0] == 200, "room again")


def test_bodies_that_never_end_keep_no_other_out(bounded: GatewayProcess) -> None:
    """Of 4 MiB they may have three quarters; the largest give way to those that come."""
    script = json.dumps({"pieces": ["x"]})
    turns = [{"role": "user", "content": "a" * 300_000}, {"role": "user", "content": script}]
    asked = json.dumps({"model": "plain", "messages": turns}).encode()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(bounded)) for _ in range(10)]
        for number, connection in enumerate(connections):
            with contextlib.suppress(ConnectionError):
                connection.sendall(POST + b"content-length: 1900000\r\n\r\n" + b" " * (990_000 + number))
        wait_until(lambda: any_answer(connections, b" 503 "), "a refusal")
        for _ in range(3):
            answer = stack.enter_context(connect(bounded))
            answer.sendall(CHAT + b"content-length: %d\r\n\r\n" % len(asked) + asked)
            assert answer.recv(65536).startswith(b"HTTP/1.1 200")


def test_pipelined_requests(bounded: GatewayProcess) -> None:
    """A few are answered in order; 14,000 in one packet would be an object of some kB each."""
    one = HEAD + b"\r\n"
    with connect(bounded) as connection:
        connection.sendall(3 * one)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 3:
            answer += connection.recv(65536)
    before = rss(bounded)
    with connect(bounded) as connection:
        attack(connection, [one * 5000] * 20)
        assert rss(bounded) - before < MOST_GROWTH_BYTES
    assert bounded.get("/health")[0] == 200


def test_what_was_answered_is_not_counted_on_a_connection_that_is_never_idle(bounded: GatewayProcess) -> None:
    """Long answers with requests behind them, that have 192 KiB of headers each time; all may have 1 MiB."""
    script = json.dumps({"pieces": ["a"], "repeat": 500})
    body = json.dumps({"model": "plain", "prompt": script, "stream": True}).encode()
    long = POST + f"content-length: {len(body)}\r\n\r\n".encode() + body
    small = 6 * (HEAD + b"x-long: " + b"a" * (32 << 10) + b"\r\n\r\n")
    with connect(bounded) as connection:
        connection.sendall(long)
        for _ in range(8):
            answer = b""
            while b"data: " not in answer:  # the long one is under way
                answer += connection.recv(65536)
                assert b" 503 " not in answer and answer
            connection.sendall(small + long)
            while answer.count(b"HTTP/1.1 200") < 6:
                part = connection.recv(65536)
                assert part and b" 503 " not in part
                answer += part


def test_connections(bounded: GatewayProcess) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(bounded)) for _ in range(220)]
        wait_until(lambda: any_answer(connections, b" 503 "), "a refusal of a connection too many")
    wait_until(lambda: bounded.get("/health")[0] == 200, "room again")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_before", "num_behind"), [(0, 1), (1, 1), (0, 2), (2, 3)])
def test_requests_behind_an_answer_do_not_hide_that_the_client_leaves(
    bounded: GatewayProcess, fake_triton: FakeTriton, stream: bool, num_before: int, num_behind: int
) -> None:
    """num_before: answered before it on the same connection, and sent with it."""
    fake_triton.cancelled.clear()
    num_asked = len(fake_triton.requests)
    body = json.dumps({"model": "plain", "prompt": '{"pieces": ["a"], "hang": true}', "stream": stream}).encode()
    small = HEAD + b"\r\n"
    with connect(bounded) as connection:
        generation = POST + f"content-length: {len(body)}\r\n\r\n".encode() + body
        connection.sendall(num_before * small + generation + num_behind * small)
        wait_until(lambda: len(fake_triton.requests) > num_asked, "the generation")
    assert fake_triton.cancelled.wait(PATIENCE_S), "it goes on for nobody"


def test_an_answer_under_way_is_not_mixed_with_a_refusal(bounded: GatewayProcess, fake_triton: FakeTriton) -> None:
    """The stream of the first request ends unfinished; the second's refusal must not be read as part of it."""
    fake_triton.cancelled.clear()
    script = json.dumps({"pieces": ["a"], "hang": True})
    body = json.dumps({"model": "plain", "prompt": script, "stream": True}).encode()
    with connect(bounded) as connection:
        connection.sendall(POST + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = connection.recv(65536)
        deadline = time.monotonic() + PATIENCE_S
        while b"data: " not in answer and time.monotonic() < deadline:
            answer += connection.recv(65536)
        connection.sendall(HEAD + b"x: 1\r\n" * 200)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert fake_triton.cancelled.wait(PATIENCE_S)
