"""What the chaos suite takes for a leak, and which sockets it leaves to server 2.51."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llm_client import GrpcStream
from llm_server import missing_server
from triton_server import TritonServer

sys.path.append(str(Path(__file__).parent))

from backoff import Backoff
from lost_streams import LostStreams, refusal
from watch import MAX_FDS_GROWTH, MIN_SAMPLES, Life, too_many_lost

NUM_CLIENTS, PAUSE_S, PATIENCE_S = 16, 0.3, 45.0
looks_at_sockets = pytest.mark.skipif(bool(refusal()), reason=f"sockets cannot be looked at: {refusal()}")


def life(*, fds: int = 0, threads: int = 0) -> Life:
    """A process whose figures grow by so much in its second half."""
    half = MIN_SAMPLES // 2
    return Life("server", [50.0] * 2 * half, [80] * half + [80 + fds] * half, [60] * half + [60 + threads] * half)


def test_descriptors_that_grow_are_a_leak() -> None:
    assert not life(fds=MAX_FDS_GROWTH).growth()
    assert life(fds=MAX_FDS_GROWTH + 1).growth() == ["file descriptors of server grew from 80 to 105"]


def test_threads_may_grow_by_one_for_each_instance_that_is_held() -> None:
    grown = life(threads=8 + 2)
    assert not grown.growth(num_held=2)
    assert grown.growth(num_held=1) == ["threads of server grew from 60 to 70"]


def test_lost_streams_are_bounded_by_the_cancelled_ones() -> None:
    assert not too_many_lost(MAX_FDS_GROWTH, num_cancelled=0)
    assert "24: 0 were cancelled" in too_many_lost(MAX_FDS_GROWTH + 1, num_cancelled=0)
    assert not too_many_lost(MAX_FDS_GROWTH + 250, num_cancelled=1000)
    assert too_many_lost(MAX_FDS_GROWTH + 251, num_cancelled=1000)


def test_kills_in_a_row_are_waited_for_as_long_as_the_backend_waits() -> None:
    backoff = Backoff()
    assert [backoff.next(healthy_s) for healthy_s in (100, 3, 3, 3, 60, 3)] == [0.5, 1, 2, 4, 0.5, 1]


@pytest.fixture
def accepted() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection in this process: the client's end, the server's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        connection, _ = listener.accept()
        with connection:
            yield client, connection


@looks_at_sockets
def test_a_socket_is_lost_when_its_client_reset_it_and_it_stays_open(
    accepted: tuple[socket.socket, socket.socket],
) -> None:
    client, connection = accepted
    port = connection.getsockname()[1]
    of_grpc, of_http = LostStreams(os.getpid(), port), LostStreams(os.getpid(), port + 1)
    assert of_grpc.count() == 0  # connected
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert of_grpc.count() == of_grpc.count() == 1
    assert of_http.count() == 0  # a closed socket of another port is a leak
    connection.close()
    assert of_grpc.count() == 0


@looks_at_sockets
@pytest.mark.skipif(bool(missing_server()), reason="tritonserver is not installed")
def test_a_server_without_any_backend_loses_cancelled_streams(tmp_path: Path) -> None:
    """So it is not a backend that loses them. The requests are refused by the server itself: it has no model."""
    repository, backends = tmp_path / "repository", tmp_path / "backends"
    repository.mkdir()
    backends.mkdir()
    with TritonServer(repository, backends, control_mode="explicit") as server:
        lost = LostStreams(server.pid, int(server.grpc_url.rpartition(":")[2]))
        until = time.monotonic() + PATIENCE_S

        def ask(cancels: bool) -> None:
            stream = GrpcStream(server.grpc_url)
            stream.send("nothing", {"text_input": "hello"})
            assert "unknown model" in stream.receive()[2]
            stream.close(cancel=cancels)
            time.sleep(PAUSE_S)  # a busy server reads the cancel together with the end, and loses none

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            list(clients.map(ask, [False] * 3 * NUM_CLIENTS))
            assert lost.count() == 0, "a stream that is read to its end leaves nothing"
            while not lost.count() and time.monotonic() < until:
                list(clients.map(ask, [True] * NUM_CLIENTS))
        assert lost.count() > 0
