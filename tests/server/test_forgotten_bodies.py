"""Large bodies that are not answered well are forgotten with their requests, not when the garbage collector looks."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until

NUM_BODIES, BODY_BYTES = 60, 4_000_000
MOST_GROWTH_BYTES = 25 * BODY_BYTES  # the C library keeps some of the pieces in which several come at a time
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TEXT = b'{"model": "plain", "prompt": "' + b"x" * BODY_BYTES
VALUES = b'{"model": "plain", "prompt": [' + b'"",' * (BODY_BYTES // 3)
ENDS = {"no JSON": TEXT + b'"', "read by another": VALUES + b'"a"]}'}


@pytest.fixture(scope="module")
def plain_gateway(fake_triton: FakeTriton) -> Iterator[GatewayProcess]:
    with GatewayProcess(fake_triton.url, ["--log-level", "error"]) as running:
        yield running


def send(gateway: GatewayProcess, body: bytes, num_bytes: int) -> int:
    """So many bytes of it; the status of the answer if these are all, else 0."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:num_bytes])
        return int(connection.recv(100).split()[1]) if num_bytes == len(body) else 0


@pytest.mark.parametrize("name", [*ENDS, "broken off"])
def test_a_body_is_forgotten_with_its_request(plain_gateway: GatewayProcess, name: str) -> None:
    body = ENDS.get(name, TEXT + b'"}')
    num_bytes = len(body) if name in ENDS else len(body) - 1
    process = psutil.Process(plain_gateway.process.pid)
    for _ in range(2):  # what the first ones allocate is no attack's
        send(plain_gateway, body, num_bytes)
    before = process.memory_info().rss
    for _ in range(NUM_BODIES):
        assert send(plain_gateway, body, num_bytes) in (0, 400)
    wait_until(lambda: process.memory_info().rss - before < MOST_GROWTH_BYTES, "the bodies to be forgotten")
